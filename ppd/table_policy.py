"""The policy ``ppd``: the decision table's route, corrected for the current load.

Without corrections it is Algorithm 1 of the PPD paper: the sign of the weighted sum of the cell's
measurements. Each correction can be left out. A correction that changes the route of a
decision is its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from ppd.catch_up import CatchUp
from ppd.decision import (
    Assessment,
    Decision,
    Features,
    HomeState,
    Policy,
    Reason,
    Route,
    may_be_local,
)
from ppd.observed import BOUND, Observed
from ppd.policies import DynamoThreshold
from ppd.score import Objective, Score, local_within_noise, score
from ppd.step_time import StepTime
from ppd.table import Cell, Costs, Table

DEFAULT_APPEND_BUDGET = 16_384


class Correction(StrEnum):
    """A correction of the table's costs or of its choice.

    Attributes:
        INTERPOLATION: interpolate costs between the points where cells were measured.
        STALE_PREFIX: add the tokens that the prefill worker has missed to a remote turn, and weigh
            what a local turn leaves to later ones (``ppd.catch_up``).
        LOAD: replace the waits of the measurement by the current ones: queues, the home's batch and
            the time of its steps; add the wait for KV where the home has none left for the turn.
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

_MIN_OUTPUT = 8  # tokens of a reply over which a delay counts as TPOT, at least
_APPENDED = 0.5  # of the append that a decode worker computes, in the mean
# Of the prompt that a prefill worker computes, where only tokens are known. It stays in the queue
# while its KV is transferred.
_PREFILLED = 0.7


@dataclass(frozen=True, slots=True)
class _Step:
    """The costs after a correction, and the reason to give if they change the route.

    Attributes:
        typical_ms: TTFT of the remote route without what is live.
        later_ms: TTFT that a local turn costs later turns.
    """

    reason: Reason
    remote: Costs
    local: Costs
    typical_ms: float
    later_ms: float


@dataclass(frozen=True, slots=True)
class _Alone:
    """What a turn takes where nothing waits and nothing was missed, beside the home's decodes.

    Attributes:
        quiet_ms: TTFT of a remote turn where nothing decodes.
        remote_ms: TTFT of a remote turn.
        local_ms: TTFT of a local turn.
        step_ms: TPOT of a remote turn.
        lost_ms: TPOT that a local turn costs, with that of the streams that it delays.
        longer_ms: what the local turn takes longer. A loss of TPOT counts as an equal share of the
            quiet TTFT.
    """

    quiet_ms: float
    remote_ms: float
    local_ms: float
    step_ms: float
    lost_ms: float
    longer_ms: float


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
        self.catch_up = CatchUp()
        self.step_time = StepTime()
        self._fallback = DynamoThreshold()
        self.prefill_times = None if table is None else table.prefill_times

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose a route by the corrected costs; Dynamo's threshold where no cell is known."""
        decision = self._by_table(features, objective)
        if decision.route is Route.LOCAL and (veto := self._veto(features)):
            return structs.replace(decision, route=Route.REMOTE, reason=veto)
        return decision

    def observe(
        self, features: Features, route: Route, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        """Record the route and the measured costs, where it has both, of a served turn.

        ``shrinkage`` compares them with the costs before shrinkage, so that its factors do not
        compound.
        """
        cell = self._cell(features)
        if cell is None or route is Route.REPLICA:
            return
        if Correction.SHRINKAGE in self.corrections and ttft_ms is not None and tpot_ms is not None:
            *_, step, _observed = self._steps(features, cell)
            expected = step.local if route is Route.LOCAL else step.remote
            self.observed.note(cell.index, route, expected, ttft_ms, tpot_ms)
        if features.turn > 1 and _has_a_choice(features):
            could = may_be_local(features)
            longer_ms = self._alone(features, cell.remote.tpot_ms).longer_ms if could else None
            held = features.prefill_cached_tokens > 0
            self.catch_up.note(cell.index, route, longer_ms, held=held)
        if tpot_ms is not None and tpot_ms > 0 and features.home is HomeState.READY:
            usual_ms = cell.remote.tpot_ms
            self.step_time.note(features.home_running, tpot_ms, usual_ms, cell.running)

    def reset(self) -> None:
        """Discard what was observed of served turns."""
        self.observed.reset()
        self.catch_up.reset()
        self.step_time.reset()

    def _by_table(self, features: Features, objective: Objective) -> Decision:
        cell = self._cell(features)
        if cell is None:
            return structs.replace(
                self._fallback.choose(features, objective), reason=Reason.UNKNOWN_CELL
            )
        scored: Score | None = None
        for step in self._steps(features, cell):
            rescored = score(objective, step.remote, step.local, step.typical_ms, step.later_ms)
            if scored is None or rescored.prefers_local is not scored.prefers_local:
                reason = step.reason
            scored = rescored
        assert scored is not None
        route = Route.LOCAL if scored.prefers_local else Route.REMOTE
        if (
            route is Route.REMOTE
            and Correction.NOISE in self.corrections
            and local_within_noise(
                objective,
                step.remote,
                step.local,
                cell.local,
                cell.noise,
                step.typical_ms,
                step.later_ms,
            )
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
        later_ms = 0.0
        yield _Step(Reason.TABLE, remote, local, remote.ttft_ms, later_ms)
        if Correction.INTERPOLATION in self.corrections:
            remote, local = self.table.interpolate(*_workload(features))
            yield _Step(Reason.INTERPOLATION, remote, local, remote.ttft_ms, later_ms)
        typical_ms, missed_ms = remote.ttft_ms, 0.0
        alone = self._alone(features, remote.tpot_ms)
        if Correction.STALE_PREFIX in self.corrections:
            missed_ms = features.missed_tokens * self.table.token_ms
            later_ms = self._later_ms(features, cell, alone, missed_ms)
            remote = _with_times(remote, remote.ttft_ms + missed_ms, remote.tpot_ms)
            yield _Step(Reason.STALE_PREFIX, remote, local, typical_ms, later_ms)
        if Correction.LOAD in self.corrections:
            typical_ms = alone.quiet_ms
            remote, local = self._loaded(features, remote, local, alone, missed_ms)
            yield _Step(Reason.LOAD, remote, local, typical_ms, later_ms)
            if room_ms := _room_ms(features, alone.step_ms):
                local = _with_times(local, local.ttft_ms + room_ms, local.tpot_ms)
                yield _Step(Reason.HOME_FULL, remote, local, typical_ms, later_ms)
        if Correction.SHRINKAGE in self.corrections:
            loaded_ms = remote.ttft_ms
            remote = self.observed.correct(cell.index, Route.REMOTE, remote)
            local = self.observed.correct(cell.index, Route.LOCAL, local)
            typical_ms *= remote.ttft_ms / loaded_ms
            yield _Step(Reason.OBSERVED, remote, local, typical_ms, later_ms)

    def _later_ms(self, features: Features, cell: Cell, alone: _Alone, missed_ms: float) -> float:
        """What a local turn leaves to later ones, with what the prefill worker has missed before.

        It leaves its new tokens, and the reply before it.
        """
        assert self.table is not None
        adds_ms = (features.new_tokens + features.reply_tokens) * self.table.token_ms
        left_ms = missed_ms + adds_ms
        return self.catch_up.later_ms(cell.index, features.turn, left_ms, alone.longer_ms)

    def _alone(self, features: Features, tpot_ms: float) -> _Alone:
        """What a turn takes without queues.

        An append delays all that decode on the home. As a loss of TPOT, that delay counts once for
        each of them, over the tokens of a reply. What is delayed decodes for longer, beside those
        that come meanwhile. So the batch and its steps grow, and the delay counts (a step / the
        least step) times. What the home has evicted is appended, too.

        Args:
            features: of the turn.
            tpot_ms: by the table.
        """
        table = self.table
        assert table is not None
        context, new, output, _ = _workload(features)
        quiet_ms, local_ms = table.quiet_ttft_ms(context, new, features.reply_tokens)
        local_ms += features.evicted_tokens * table.record.append_ms_per_token
        delay_ms = max(0.0, local_ms - table.empty_append_ms)
        lost_ms = features.home_running * delay_ms / max(_MIN_OUTPUT, output)
        step_ms = self.step_time.of(features.home_running, tpot_ms, table.min_step_ms)
        lost_ms *= step_ms / table.min_step_ms
        remote_ms = quiet_ms
        if features.home_running:
            appended = new + features.evicted_tokens
            added = table.decode_waits.added_ttft_ms(new, appended, step_ms)
            remote_ms += added[0]
            local_ms += added[1]
        longer_ms = local_ms - remote_ms + lost_ms / step_ms * quiet_ms
        bound_ms = BOUND * quiet_ms  # one turn must not outweigh all others
        longer_ms = max(-bound_ms, min(bound_ms, longer_ms))
        return _Alone(quiet_ms, remote_ms, local_ms, step_ms, lost_ms, longer_ms)

    def _loaded(
        self, features: Features, remote: Costs, local: Costs, alone: _Alone, missed_ms: float
    ) -> tuple[Costs, Costs]:
        """The costs with the current waits and steps in place of those of the measurement."""
        table = self.table
        assert table is not None
        wait_ms = features.prefill_wait_ms
        if wait_ms is None:
            queue = _left(features.prefill_queue_tokens, features.prompt_tokens, _PREFILLED)
            wait_ms = queue * table.token_ms
        appends = _left(features.home_append_tokens, features.uncached_at_home, _APPENDED)
        remote_ms = alone.remote_ms + missed_ms + wait_ms
        local_ms = alone.local_ms + appends * table.record.append_ms_per_token
        return (
            _with_times(remote, remote_ms, alone.step_ms),
            _with_times(local, local_ms, alone.step_ms + alone.lost_ms),
        )

    def _veto(self, features: Features) -> Reason | None:
        """The reason for which a turn must not be local, at any saving; None without one."""
        claimed = max(features.home_append_tokens, features.home_claimed_tokens)
        under_way = claimed + features.uncached_at_home
        if Correction.RESERVATION in self.corrections and under_way > self.append_budget_tokens:
            return Reason.APPEND_BUDGET
        if Correction.LOAD in self.corrections and features.home_lacks_tokens:
            return None if features.home_running else Reason.HOME_FULL  # none will end
        return None


def _room_ms(features: Features, step_ms: float) -> float:
    """How long a local turn waits for KV on its home: until enough requests there have ended.

    They are taken to be like this turn, and to end one after the other.
    """
    if not (features.home_lacks_tokens and features.home_running):
        return 0.0
    ends = math.ceil(features.home_lacks_tokens / (features.prompt_tokens + features.output_tokens))
    return ends * features.output_tokens * step_ms / features.home_running


def _has_a_choice(features: Features) -> bool:
    """Whether the next turn of the conversation may be local, even if this one may not."""
    return (
        features.home in (HomeState.READY, HomeState.GONE)
        and features.min_cached_tokens > 0
        and not features.has_media
        and features.has_prefill
    )


def _left(queued: int, size: int, done: float) -> float:
    """The tokens of a queue that are not computed yet; its prompts are as long as this turn's.

    Args:
        queued: tokens in the queue.
        size: tokens of this turn.
        done: share of the first prompt that is computed.
    """
    return queued - done * min(queued, size)


def _with_times(costs: Costs, ttft_ms: float, tpot_ms: float) -> Costs:
    """The costs with other times; ``dataclasses.replace`` takes three times as long."""
    return Costs(ttft_ms, tpot_ms, costs.ttft_tail, costs.tpot_tail, costs.tokens_per_s)


def _workload(features: Features) -> tuple[int, int, int, float]:
    """The coordinates of a turn on the table's axes."""
    return (
        features.context_tokens,
        features.new_tokens,
        features.output_tokens,
        features.qps,
    )
