"""A simulation that goes on in a fork of its process.

The parent has it go on to a time, and gets the costs of the turns that ended meanwhile. Then the
fork waits, so that a later time is reached without simulating the earlier ones once more.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from ppd.errors import PpdError

Turn = tuple[str, int]  # the session's name, and the turn's number


class RolloutError(PpdError):
    """A fork ended without a cost."""


class Ended(NamedTuple):
    """A turn that has ended in a fork.

    Attributes:
        decided_ms: when its route was chosen; minus infinity if that was before the fork.
    """

    session: str
    turn_number: int
    decided_ms: float
    cost: float

    @property
    def turn(self) -> Turn:
        """The turn's key."""
        return self.session, self.turn_number


_DECODER = msgspec.msgpack.Decoder(list[Ended])


class Rollout:
    """The parent's side of a fork.

    Attributes:
        ended: turns that have ended there, unless they were dropped.
    """

    def __init__(self, process: int, connection: Connection) -> None:
        self.ended: list[Ended] = []
        self._process = process
        self._connection = connection
        self._exit_code: int | None = None

    def run_to(self, ends_ms: float) -> None:
        """Simulate until all turns have ended that are decided up to a time.

        Raises:
            RolloutError: the fork has ended.
        """
        try:
            self._connection.send(ends_ms)
            data = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise RolloutError(f"a rollout ended with exit code {self.close()}") from error
        self.ended += _DECODER.decode(data)

    def costs(self, under_way: Iterable[Turn], now_ms: float, ends_ms: float) -> dict[Turn, float]:
        """Return what turns cost that are under way now, or are decided from now to a time.

        The others will not count at any later time either, so they are dropped.
        """
        counted = set(under_way)
        self.ended = [one for one in self.ended if one.turn in counted or one.decided_ms >= now_ms]
        return {one.turn: one.cost for one in self.ended if one.decided_ms <= ends_ms}

    def detach(self) -> None:
        """Close the connection in a process that is another fork."""
        self._connection.close()

    def close(self) -> int:
        """End the fork, if it has not ended.

        Returns:
            Its exit code; a signal's number below 0.
        """
        self._connection.close()
        if self._exit_code is None:
            _, status = os.waitpid(self._process, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


class Fork:
    """The fork's side.

    Args:
        under_way: turns whose routes are decided.
    """

    def __init__(self, connection: Connection, under_way: Iterable[Turn]) -> None:
        gc.disable()  # it would copy all pages that parent and fork share
        self._connection = connection
        self._decided = dict.fromkeys(under_way, -math.inf)  # in the order of their times
        self._ended: list[Ended] = []
        self._ends_ms = self._next_end()

    def decide(self, turn: Turn, now_ms: float) -> None:
        """Count a turn whose route is decided now."""
        self._decided[turn] = now_ms

    def end(self, turn: Turn, cost: float | None, now_ms: float) -> None:
        """Count the cost of a turn that ends now. Wait if no turn is left that the parent needs.

        Args:
            cost: None: it does not count.
        """
        decided_ms = self._decided.pop(turn, None)
        if decided_ms is not None and cost is not None:
            self._ended.append(Ended(*turn, decided_ms, cost))
        while now_ms > self._ends_ms and self._first_ms() > self._ends_ms:
            self._report()

    def finish(self) -> None:
        """Give the parent what is left, as long as it asks: the simulation is over."""
        while True:
            self._report()

    def _first_ms(self) -> float:
        return next(iter(self._decided.values()), math.inf)

    def _report(self) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(self._ended))
        except OSError:
            os._exit(0)  # the parent has ended
        self._ended = []
        self._ends_ms = self._next_end()

    def _next_end(self) -> float:
        try:
            ends_ms = self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        assert isinstance(ends_ms, float)
        return ends_ms


def fork(under_way: Iterable[Turn]) -> Rollout | Fork:
    """Fork this process: the parent gets a ``Rollout``, the fork a ``Fork`` when it shall go on."""
    mine, others = Pipe()
    if (process := os.fork()) == 0:
        mine.close()
        return Fork(others, under_way)
    others.close()
    return Rollout(process, mine)
