"""The steps of emulated ranks with DP attention, which begin and end together.

Each rank is a process with a device of its own. A step begins when the last rank has launched its
part, and takes as long as the longest part. The ranks tell each other by a file that all of them
map; SGLang has them launch the same number of steps, empty ones too.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ppd.errors import PpdError

_PART = struct.Struct("<dd")  # ready at (s), takes (s)
_STEP = struct.Struct("<Q")
_SLOT_SIZE = _PART.size + _STEP.size
_GENERATIONS = 2  # a rank is at most one step ahead of another
_POLL_S = 0.0005
_PATIENCE_S = 600.0


class Collective:
    """One rank's part in the steps of its server.

    Args:
        path: the file, made before the ranks start by :meth:`create`.
        clock: seconds, the same in all processes of the machine.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        ranks: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert 0 <= rank < ranks
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _GENERATIONS * ranks * _SLOT_SIZE)
        self._rank = rank
        self._ranks = ranks
        self._steps = 0
        self._clock = clock
        self._sleep = sleep

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Make the file of a server."""
        path.write_bytes(bytes(_GENERATIONS * ranks * _SLOT_SIZE))

    def agree(self, ready_s: float, takes_s: float) -> tuple[float, float]:
        """Launch this rank's part of the next step, and wait for those of the others.

        Args:
            ready_s: when this rank's device can begin.
            takes_s: what its part takes; 0 if it has none.

        Returns:
            When the step begins, and how long it takes, in seconds.

        Raises:
            PpdError: another rank has not launched its part for ten minutes.
        """
        self._steps += 1
        own = self._slot(self._rank)
        _PART.pack_into(self._map, own, ready_s, takes_s)
        _STEP.pack_into(self._map, own + _PART.size, self._steps)  # now the others may read it
        deadline_s = self._clock() + _PATIENCE_S
        slots = [self._slot(rank) for rank in range(self._ranks)]
        while any(_STEP.unpack_from(self._map, s + _PART.size)[0] != self._steps for s in slots):
            if self._clock() > deadline_s:
                raise PpdError(f"step {self._steps} of rank {self._rank}: another rank lacks it")
            self._sleep(_POLL_S)
        parts = [_PART.unpack_from(self._map, slot) for slot in slots]
        return max(ready_s for ready_s, _ in parts), max(takes_s for _, takes_s in parts)

    def _slot(self, rank: int) -> int:
        return (self._steps % _GENERATIONS * self._ranks + rank) * _SLOT_SIZE
