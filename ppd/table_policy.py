"""The policy ``ppd``: the decision table's route, corrected for the current load.

Without corrections it is Algorithm 1 of the PPD paper: the sign of the weighted sum of the cell's
two measurements. Each correction can be left out. A correction that changes the route of a
decision is its reason.
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
    """A correction of the table's costs or of its choice.

    Attributes:
        INTERPOLATION: interpolate costs between the points where cells were measured.
        STALE_PREFIX: add the tokens that the prefill worker has missed to a remote turn.
        LOAD: add the current queues and the home's batch where they are longer than in the
            measurement; refuse a local turn for which the home has no free KV.
        RESERVATION: keep the append tokens under way on a decode worker within a budget.
        SHRINKAGE: multiply a cell's costs by the factors observed in served turns.
        NOISE: choose remote only if it is better by more than the measurement's standard error.
    """

    INTERPOLATION = "interpolation"
    STALE_PREFIX = "stale_prefix"
    LOAD = "load"
    RESERVATION = "reservation"
    SHRINKAGE = "shrinkage"
    NOISE = "noise"


# These depend on exact inputs: the state of the cluster, and the table's own standard errors.
DEFAULT_CORRECTIONS = frozenset(
    {Correction.STALE_PREFIX, Correction.LOAD, Correction.RESERVATION, Correction.NOISE}
)

_MAX_CROWDING = 2.0  # bound on the extrapolation of TPOT losses to larger batches


@dataclass(frozen=True, slots=True)
class _Step:
    """The costs after a correction, and the reason to give if they change the route."""

    reason: Reason
    remote: Costs
    local: Costs


class TablePolicy(Policy):
    """Chooses routes by a decision table and the enabled corrections.

    Args:
        table: the table; None if there is none for the model, then every cell is unknown.
        corrections: the enabled corrections.
        append_budget_tokens: the budget of the ``reservation`` correction, per decode worker.
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
        """Choose a route by the corrected costs; Dynamo's threshold where no cell is known."""
        decision = self._by_table(features, objective)
        if decision.route is Route.LOCAL and (veto := self._veto(features)):
            return structs.replace(decision, route=Route.REMOTE, reason=veto)
        return decision

    def observe(self, features: Features, route: Route, ttft_ms: float, tpot_ms: float) -> None:
        """Record the measured costs of a served turn for the ``shrinkage`` correction.

        They are compared with the costs before shrinkage, so that its factors do not compound.
        """
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
            rescored = score(objective, step.remote, step.local)
            if scored is None or rescored.prefers_local is not scored.prefers_local:
                reason = step.reason
            scored = rescored
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
        """Iterate over the cell's costs, then those after each correction; shrinkage is last."""
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
            # The TTFT of a turn is its TTFT alone plus the current wait. The cell's own TTFT
            # includes the wait that is usual at its QPS, and is the minimum.
            if features.prefill_queue_tokens:
                wait_ms = features.prefill_queue_tokens * record.prefill_ms_per_token
                now_ms = cell.quiet_remote_ms + late_ms + wait_ms
                remote = replace(remote, ttft_ms=max(now_ms, remote.ttft_ms))
            if features.home_append_tokens:
                wait_ms = features.home_append_tokens * record.append_ms_per_token
                now_ms = cell.quiet_local_ms + wait_ms
                local = replace(local, ttft_ms=max(now_ms, local.ttft_ms))
            # A larger batch has more conversations, whose next turns are appended beside it.
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
        """The reason for which a turn must not be local, at any saving; None without one."""
        under_way = features.home_append_tokens + features.uncached_at_home
        if Correction.RESERVATION in self.corrections and under_way > self.append_budget_tokens:
            return Reason.APPEND_BUDGET
        if Correction.LOAD in self.corrections and not features.fits_at_home:
            return Reason.HOME_FULL
        return None


def _workload(features: Features) -> tuple[int, int, int, float]:
    """The coordinates of a turn on the table's axes."""
    return (
        features.context_tokens,
        features.new_tokens,
        features.output_tokens,
        features.qps,
    )
