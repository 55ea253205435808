"""What could be won: each turn takes the route that a simulation of the future finds better.

At every decision two forks of the process each try a route. A fork serves the turn on its route,
decides all later turns by the base policy, and runs on to its horizon. Its arrivals and lengths are
those to come, which no router has. The turns that both forks have decided by then are compared, and
the route is taken with which they cost less. A route that delays replies delays the turns behind
them, too: its fork would decide fewer by its horizon, so their sum alone would be lower. This
is the rollout algorithm with exact lookahead (Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for
combinatorial optimization", 1997). It is no optimum: what comes after the horizon does not count.

The fork whose route is taken is kept. It decides by the base policy, so at the next decision it has
tried that policy's route already, and its horizon moves. Only the other route needs a new fork.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.score import Objective

from .rollout import Fork, Rollout, Turn, fork

CostOf = Callable[[Turn, float, float], float]  # of a turn, from its TTFT and TPOT in ms
# Of a decision of the base and what the other route costs less: whether to take the other one.
Changes = Callable[[Features, Decision, float], bool]


def where_it_pays(_features: Features, usual: Decision, saved: float) -> bool:
    """Take the other route where it costs less, and of equal ones the local one."""
    return saved > 0.0 or (saved == 0.0 and usual.route is Route.REMOTE)


class Clairvoyant(Policy):
    """Chooses the route after which the later turns cost less. Leave its context after the run.

    Args:
        base: decides all turns in a fork but the first; it observes all turns.
        cost: of one later turn.
        now_ms: the simulated time.
        horizon_ms: turns that are decided so long after the fork count.
        changes: whether a turn takes another route than the base's.
    """

    def __init__(
        self,
        base: Policy,
        cost: CostOf,
        now_ms: Callable[[], float],
        horizon_ms: float,
        changes: Changes = where_it_pays,
    ) -> None:
        self.prefill_times = base.prefill_times
        self._base = base
        self._cost_of = cost
        self._now_ms = now_ms
        self._horizon_ms = horizon_ms
        self._changes = changes
        self._under_way: dict[Turn, None] = {}
        self._kept: Rollout | None = None  # of the routes taken so far, and then of the base policy
        self._fork: Fork | None = None  # if this process is one

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fork is not None:
            if error is not None:
                traceback.print_exception(error)
                os._exit(1)
            self._fork.finish()
        elif self._kept is not None:
            self._kept.close()

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose a route: in a fork by the base policy, else by two forks."""
        usual = self._base.choose(features, objective)
        turn = features.session, features.turn
        if self._fork is not None:
            self._fork.decide(turn, self._now_ms())
            return usual
        self._under_way[turn] = None
        route = self._explore(features, usual)
        # A reason may tell placement to avoid the home, so it stays where the route does.
        return usual if route is usual.route else Decision(route, Reason.TABLE)

    def observe(
        self, features: Features, route: Route, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        """Count the cost of a turn that has ended."""
        self._base.observe(features, route, ttft_ms, tpot_ms)
        turn = features.session, features.turn
        if self._fork is None:
            self._under_way.pop(turn, None)
            return
        cost = None  # a turn that was not decoded at its home has none
        if ttft_ms is not None and tpot_ms is not None:
            cost = self._cost_of(turn, ttft_ms, tpot_ms)
        self._fork.end(turn, cost, self._now_ms())

    def _explore(self, features: Features, usual: Decision) -> Route:
        """Return the route to take; in a fork the one that it tries.

        Raises:
            RolloutError: a fork has failed.
        """
        if self._kept is None:
            kept = fork(self._under_way)
            if isinstance(kept, Fork):
                self._fork = kept
                return usual.route
            self._kept = kept
        kept_costs = self._costs(self._kept)
        other = Route.REMOTE if usual.route is Route.LOCAL else Route.LOCAL
        tried = fork(self._under_way)
        if isinstance(tried, Fork):
            self._kept.detach()
            self._fork = tried
            return other
        other_costs = self._costs(tried)
        both = kept_costs.keys() & other_costs.keys()
        saved = total(kept_costs, both) - total(other_costs, both)
        if not self._changes(features, usual, saved):
            tried.close()
            return usual.route
        self._kept.close()
        self._kept = tried
        return other

    def _costs(self, rollout: Rollout) -> Mapping[Turn, float]:
        """Return what turns cost in a fork that are decided up to its horizon."""
        now_ms = self._now_ms()
        ends_ms = now_ms + self._horizon_ms
        rollout.run_to(ends_ms)
        return rollout.costs(self._under_way, now_ms, ends_ms)


def total(costs: Mapping[Turn, float], turns: Iterable[Turn]) -> float:
    """Add the costs of some turns, in an order that does not depend on the process."""
    return math.fsum(costs[turn] for turn in turns)
