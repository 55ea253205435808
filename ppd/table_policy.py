"""``ppd``: the route that the decision table says, corrected by what is live.

Without corrections it is Algorithm 1 of the PPD paper: the cell's two measurements, the
weights, the sign. Each correction can be left out, and is the reason of a decision that it
has turned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from msgspec import structs

from ppd.decision import Assessment, Decision, Features, Policy, Reason, Route
from ppd.observed import Observed
from ppd.policies import DynamoThreshold
from ppd.score import Objective, Score, local_within_noise, score
from ppd.table import Cell, Costs, Table

DEFAULT_APPEND_BUDGET = 16_384


class Correction(StrEnum):
    """``interpolation``: take costs between the points where cells were measured.
    ``stale_prefix``: a remote turn also computes what its prefill worker has missed.
    ``load``: queues and the home's batch, where they are worse than usual; no local turn
    without KV for it.
    ``reservation``: no more append tokens under way on a decode worker than its budget.
    ``shrinkage``: move a cell's costs towards what its turns took.
    ``noise``: remote only if it is better by more than the standard error of the measurements.
    """

    INTERPOLATION = "interpolation"
    STALE_PREFIX = "stale_prefix"
    LOAD = "load"
    RESERVATION = "reservation"
    SHRINKAGE = "shrinkage"
    NOISE = "noise"


# What is known for certain, of the moment and of the table. The other two change what cells say.
DEFAULT_CORRECTIONS = frozenset(
    {Correction.STALE_PREFIX, Correction.LOAD, Correction.RESERVATION, Correction.NOISE}
)

_MAX_CROWDING = 2.0  # how far TPOT losses are carried beyond the batch they were measured with


@dataclass(frozen=True, slots=True)
class _Step:
    """Costs after a correction, and the reason it is if they turn the decision."""

    reason: Reason
    remote: Costs
    local: Costs


class TablePolicy(Policy):
    """Args:
    table: None if there is none for the model: every cell is unknown then.
    append_budget_tokens: of the ``reservation`` correction, for each decode worker.
    """

    def __init__(
        self,
        table: Table | None,
        corrections: frozenset[Correction] = DEFAULT_CORRECTIONS,
        append_budget_tokens: int = DEFAULT_APPEND_BUDGET,
    ) -> None:
        self.table = table
        self.corrections = corrections
        self.append_budget_tokens = append_budget_tokens
        self.observed = Observed()
        self._fallback = DynamoThreshold()

    def choose(self, features: Features, objective: Objective) -> Decision:
        decision = self._by_table(features, objective)
        if decision.route is Route.LOCAL and (veto := self._veto(features)):
            return structs.replace(decision, route=Route.REMOTE, reason=veto)
        return decision

    def observe(self, features: Features, route: Route, ttft_ms: float, tpot_ms: float) -> None:
        """Compare with the costs before shrinkage: shrinkage shall learn what is left over."""
        cell = self._cell(features)
        if cell is None or route is Route.REPLICA or Correction.SHRINKAGE not in self.corrections:
            return
        *_, step, _observed = self._steps(features, cell)
        expected = step.local if route is Route.LOCAL else step.remote
        self.observed.note(cell.index, route, expected, ttft_ms, tpot_ms)

    def _by_table(self, features: Features, objective: Objective) -> Decision:
        cell = self._cell(features)
        if cell is None:
            return structs.replace(
                self._fallback.choose(features, objective), reason=Reason.UNKNOWN_CELL
            )
        scored: Score | None = None
        for step in self._steps(features, cell):
            again = score(objective, step.remote, step.local)
            if scored is None or again.prefers_local is not scored.prefers_local:
                reason = step.reason
            scored = again
        assert scored is not None
        route = Route.LOCAL if scored.prefers_local else Route.REMOTE
        if (
            route is Route.REMOTE
            and Correction.NOISE in self.corrections
            and local_within_noise(objective, step.remote, step.local, cell.local, cell.noise)
        ):
            route, reason = Route.LOCAL, Reason.NOISE
        return Decision(route, reason, Assessment(cell.label, step.remote, step.local, scored))

    def _cell(self, features: Features) -> Cell | None:
        if self.table is None:
            return None
        return self.table.find(*_workload(features))

    def _steps(self, features: Features, cell: Cell) -> Iterator[_Step]:
        """The cell's costs, then what each correction makes of them; shrinkage is the last."""
        assert self.table is not None
        remote, local = cell.remote, cell.local
        yield _Step(Reason.TABLE, remote, local)
        if Correction.INTERPOLATION in self.corrections:
            remote, local = self.table.interpolate(*_workload(features))
            yield _Step(Reason.INTERPOLATION, remote, local)
        record = self.table.record
        late_ms = 0.0
        if Correction.STALE_PREFIX in self.corrections and features.missed_tokens:
            late_ms = features.missed_tokens * record.prefill_ms_per_token
            remote = replace(remote, ttft_ms=remote.ttft_ms + late_ms)
            yield _Step(Reason.STALE_PREFIX, remote, local)
        if Correction.LOAD in self.corrections:
            # A turn takes what it takes alone, after what waits before it now. The cell holds the
            # waiting that is usual at its QPS: never less than that.
            if features.prefill_queue_tokens:
                wait_ms = features.prefill_queue_tokens * record.prefill_ms_per_token
                now_ms = cell.quiet_remote_ms + late_ms + wait_ms
                remote = replace(remote, ttft_ms=max(now_ms, remote.ttft_ms))
            if features.home_append_tokens:
                wait_ms = features.home_append_tokens * record.append_ms_per_token
                now_ms = cell.quiet_local_ms + wait_ms
                local = replace(local, ttft_ms=max(now_ms, local.ttft_ms))
            # In a fuller batch there are more whose next turns are appended into its decoding.
            lost_ms = local.tpot_ms - remote.tpot_ms
            crowding = (features.home_running + 1) / (cell.running + 1)
            if lost_ms > 0 and crowding > 1:
                lost_ms *= min(_MAX_CROWDING, crowding)
                local = replace(local, tpot_ms=remote.tpot_ms + lost_ms)
            yield _Step(Reason.LOAD, remote, local)
        if Correction.SHRINKAGE in self.corrections:
            yield _Step(
                Reason.OBSERVED,
                self.observed.correct(cell.index, Route.REMOTE, remote),
                self.observed.correct(cell.index, Route.LOCAL, local),
            )

    def _veto(self, features: Features) -> Reason | None:
        """Why a turn must not go local, whatever it would save."""
        under_way = features.home_append_tokens + features.uncached_at_home
        if Correction.RESERVATION in self.corrections and under_way > self.append_budget_tokens:
            return Reason.APPEND_BUDGET
        if Correction.LOAD in self.corrections and not features.fits_at_home:
            return Reason.HOME_FULL
        return None


def _workload(features: Features) -> tuple[int, int, int, float]:
    """A turn's place on the table's axes."""
    return (
        features.context_tokens,
        features.new_tokens,
        features.output_tokens,
        features.qps,
    )
