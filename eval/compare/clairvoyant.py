"""What could be won: each turn takes the route that a simulation of the future finds better.

At every decision the process forks twice, once for each route. A fork serves the turn on its route,
decides all later turns by the base policy, and runs on to its horizon. It knows all arrivals and
lengths to come, as no router can. The turns that both forks have decided by then are compared, and
the route is taken with which they cost less. A route that delays replies delays the turns behind
them, too: its fork would decide fewer by its horizon, so their sum alone would be lower. This
is the rollout algorithm with exact lookahead (Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for
combinatorial optimization", 1997). It is no optimum, but a bound that a policy may be held against.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable

import msgspec

from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.errors import PpdError
from ppd.score import Objective

Turn = tuple[str, int]  # the session's name, and the turn's number
CostOf = Callable[[Turn, float, float], float]  # of a turn, from its TTFT and TPOT in ms

_Costs = dict[str, float]  # of turns, by session and number
_DECODER = msgspec.msgpack.Decoder(_Costs)


class RolloutError(PpdError):
    """A fork ended without a cost."""


class Clairvoyant(Policy):
    """Chooses the route after which the later turns cost less.

    Args:
        base: decides all turns in a fork but the first.
        cost: of one later turn.
        now_ms: the simulated time.
        horizon_ms: turns that are decided so long after the fork count.
    """

    def __init__(
        self, base: Policy, cost: CostOf, now_ms: Callable[[], float], horizon_ms: float
    ) -> None:
        self._base = base
        self._cost_of = cost
        self._now_ms = now_ms
        self._horizon_ms = horizon_ms
        self._under_way: set[Turn] = set()
        # Of a fork alone:
        self._pipe: int | None = None
        self._ends_ms = 0.0
        self._costs: _Costs = {}

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose a route: in a fork by the base policy, else by two forks."""
        if self._pipe is not None:
            if self._now_ms() <= self._ends_ms:
                self._under_way.add(_turn(features))
            return self._base.choose(features, objective)
        self._under_way.add(_turn(features))
        return Decision(self._explore(), Reason.TABLE)

    def observe(
        self, features: Features, route: Route, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        """Count the cost of a turn that has ended; a fork ends with the last one that counts."""
        turn = _turn(features)
        counts = turn in self._under_way
        self._under_way.discard(turn)
        if self._pipe is None:
            return
        if counts:
            assert ttft_ms is not None
            assert tpot_ms is not None
            session, number = turn
            self._costs[f"{number} {session}"] = self._cost_of(turn, ttft_ms, tpot_ms)
        if not self._under_way and self._now_ms() > self._ends_ms:
            self.finish()

    def finish(self) -> None:
        """End this process if it is a fork. Call it when the simulation is over."""
        if self._pipe is not None:
            with os.fdopen(self._pipe, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(self._costs))
            os._exit(0)

    def _explore(self) -> Route:
        """Return the better route; in a fork the route that it shall try."""
        costs: dict[Route, _Costs] = {}
        for route in (Route.LOCAL, Route.REMOTE):
            reader, writer = os.pipe()
            if (fork := os.fork()) == 0:
                gc.disable()  # it would copy all pages that parent and fork share
                self._pipe, self._ends_ms = writer, self._now_ms() + self._horizon_ms
                return route
            os.close(writer)
            with os.fdopen(reader, "rb") as pipe:
                data = pipe.read()
            _, status = os.waitpid(fork, 0)
            if status or not data:
                raise RolloutError(f"the rollout of a {route} turn ended with status {status}")
            costs[route] = _DECODER.decode(data)
        local, remote = costs[Route.LOCAL], costs[Route.REMOTE]
        both = local.keys() & remote.keys()
        return Route.LOCAL if total(local, both) <= total(remote, both) else Route.REMOTE


def total(costs: _Costs, turns: Iterable[str]) -> float:
    """Add the costs of some turns, in an order that does not depend on the process."""
    return math.fsum(costs[turn] for turn in turns)


def _turn(features: Features) -> Turn:
    return features.session, features.turn
