"""The summary of a run, from its samples: pure functions.

Percentiles are values that were measured (nearest rank). Failures are no latencies: they count in
the success rate, and as turns that met no target.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppd.decision import Route

from .samples import Sample, gap_bound_ms, sum_gaps
from .traffic.conversations import Conversation

MIN_SUCCESS = 0.95  # the paper's: a point with less is no measurement
MIN_CONVERSATIONS, MIN_WALL_S = 200, 60.0  # of a result that is reported
MAX_LATE_MS = 20.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one turn; None: any will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is a target."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, sample: Sample) -> bool:
        """A reply of one token has no TPOT, and meets any."""
        if sample.error:
            return False
        if self.ttft_ms is not None and sample.ttft_ms > self.ttft_ms:
            return False
        return self.tpot_ms is None or sample.output_tokens < 2 or sample.tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some values."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of turns that succeeded, in ms; None where there is none.

    Attributes:
        tpot_ms: of replies of two tokens and more.
        itl_ms: between events with tokens, of all replies together; up to 5 % too long.
    """

    turns: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a run.

    Attributes:
        planned: turns; of these ``sent``, ``ok`` and ``failed``. Turns behind a failed one are
            never sent.
        success_rate: of the turns planned.
        valid: the success rate is what the paper asks for.
        wall_s: from the start of the run to the end of its last turn.
        goodput_turns_per_s: turns that met the targets; None without targets.
        slo_share: the same, of the turns planned.
        late_ms: sends after they were due: the client's own doing.
        cached_share: of the prompts of later turns.
        latencies: of all turns, first ones, later ones.
        notes: what a reader must know before believing the rest.
    """

    conversations: int
    planned: int
    sent: int
    ok: int
    failed: int
    failures: Mapping[str, int]
    success_rate: float
    valid: bool
    wall_s: float
    turns_per_s: float
    output_tokens_per_s: float
    goodput_turns_per_s: float | None
    slo_share: float | None
    late_ms: Spread | None
    routes: Mapping[str, int]
    cached_share: float | None
    latencies: Mapping[str, Latencies]
    notes: tuple[str, ...]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed.

    Args:
        ordered: not empty, ascending.
    """
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and percentiles, or None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    cuts = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    figures = (statistics.fmean(ordered), *cuts, ordered[-1])
    return Spread(len(ordered), *(round(figure, 3) for figure in figures))


def spread_of_gaps(counts: Mapping[int, int]) -> Spread | None:
    """Summarize a histogram of :func:`eval.samples.gap_bucket`, by the buckets' upper bounds."""
    n = sum(counts.values())
    if not n:
        return None
    ordered = sorted(counts.items())

    def at(share: float) -> float:
        left = math.ceil(share * n - 1e-9)
        for bucket, count in ordered:
            left -= count
            if left <= 0:
                return gap_bound_ms(bucket)
        return gap_bound_ms(ordered[-1][0])

    mean = sum(gap_bound_ms(bucket) * count for bucket, count in ordered) / n
    figures = (mean, at(0.5), at(0.9), at(0.99), at(1.0))
    return Spread(n, *(round(figure, 3) for figure in figures))


def latencies(samples: Sequence[Sample]) -> Latencies:
    """Summarize the latencies of turns that succeeded."""
    fine = [sample for sample in samples if not sample.error]
    return Latencies(
        turns=len(fine),
        ttft_ms=spread([sample.ttft_ms for sample in fine]),
        tpot_ms=spread([sample.tpot_ms for sample in fine if sample.output_tokens > 1]),
        itl_ms=spread_of_gaps(sum_gaps([sample.gaps for sample in fine])),
        e2e_ms=spread([sample.e2e_ms for sample in fine]),
    )


def summarize(
    samples: Sequence[Sample], plan: Sequence[Conversation], wall_s: float, slo: Slo
) -> Summary:
    """Summarize a run.

    Args:
        samples: one for each turn that was sent.
    """
    planned = sum(len(conversation.turns) for conversation in plan)
    fine = [sample for sample in samples if not sample.error]
    later = [sample for sample in fine if sample.turn > 1]
    good = sum(slo.met_by(sample) for sample in fine)
    prompts = sum(sample.context_tokens + sample.new_tokens for sample in later)
    late = spread([sample.late_ms for sample in samples])
    success_rate = len(fine) / planned if planned else 0.0
    failures = Counter(sample.failure.value for sample in samples if sample.failure is not None)
    return Summary(
        conversations=len(plan),
        planned=planned,
        sent=len(samples),
        ok=len(fine),
        failed=len(samples) - len(fine),
        failures=dict(failures),
        success_rate=round(success_rate, 4),
        valid=success_rate >= MIN_SUCCESS,
        wall_s=round(wall_s, 3),
        turns_per_s=_rate(len(fine), wall_s),
        output_tokens_per_s=_rate(sum(sample.output_tokens for sample in fine), wall_s),
        goodput_turns_per_s=_rate(good, wall_s) if slo.given else None,
        slo_share=round(good / planned, 4) if slo.given and planned else None,
        late_ms=late,
        routes=dict(Counter(sample.route for sample in fine if sample.route in [*Route])),
        cached_share=(
            round(sum(sample.cached_tokens for sample in later) / prompts, 4) if prompts else None
        ),
        latencies={
            "all": latencies(samples),
            "first": latencies([sample for sample in samples if sample.turn == 1]),
            "later": latencies([sample for sample in samples if sample.turn > 1]),
        },
        notes=tuple(_notes(success_rate, late, len(plan), wall_s)),
    )


def _rate(count: int, wall_s: float) -> float:
    return round(count / wall_s, 3) if wall_s > 0 else 0.0


def _notes(
    success_rate: float, late: Spread | None, conversations: int, wall_s: float
) -> list[str]:
    notes = []
    if success_rate < MIN_SUCCESS:
        notes.append(
            f"{success_rate:.1%} of the turns succeeded; latencies of fewer than "
            f"{MIN_SUCCESS:.0%} are those of survivors"
        )
    if late is not None and late.p99 > MAX_LATE_MS:
        notes.append(
            f"the client fell behind: sends were {late.p99:g} ms late at the 99th percentile; "
            "less came than was planned, and what came was read late"
        )
    if conversations < MIN_CONVERSATIONS or wall_s < MIN_WALL_S:
        notes.append(
            f"{conversations} conversations in {wall_s:.0f} s; reported results take "
            f"{MIN_CONVERSATIONS} and {MIN_WALL_S:.0f} s, and several seeds"
        )
    return notes
