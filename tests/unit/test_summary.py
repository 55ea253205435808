"""Summaries of samples: percentiles, targets, success, lateness."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.samples import Failure, Sample, gap_bound_ms, gap_bucket
from eval.summary import Slo, percentile, spread, spread_of_gaps, summarize
from eval.traffic.conversations import Conversation, PlannedTurn

PLAN = [Conversation(0.0, (PlannedTurn(10, 5), PlannedTurn(10, 5)))] * 2


def sample(conversation: int = 0, turn: int = 1, **fields: Any) -> Sample:
    told = {
        "sent_at_s": 0.0, "late_ms": 0.1, "context_tokens": 15 * (turn - 1), "new_tokens": 10,
        "output_tokens": 5, "ttft_ms": 100.0, "tpot_ms": 10.0, "e2e_ms": 140.0,
    }  # fmt: skip
    return Sample(conversation, turn, **{**told, **fields})


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_an_observed_value_and_splits_the_sample(
    values: list[float], share: float
) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_percentiles_of_a_hundred() -> None:
    told = spread([float(n) for n in range(1, 101)])
    assert told is not None
    assert (told.p50, told.p90, told.p99, told.max) == (50, 90, 99, 100)
    assert spread([]) is None


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200))
def test_a_histogram_of_gaps_is_right_to_5_percent(gaps_ms: list[float]) -> None:
    counts: dict[int, int] = {}
    for gap_ms in gaps_ms:
        bucket = gap_bucket(gap_ms)
        assert gap_ms <= gap_bound_ms(bucket) * (1 + 1e-9)
        assert gap_bound_ms(bucket) <= max(0.0101, 1.0501 * gap_ms)
        counts[bucket] = counts.get(bucket, 0) + 1
    exact, told = spread(gaps_ms), spread_of_gaps(counts)
    assert exact is not None
    assert told is not None
    assert told.n == len(gaps_ms)
    for name in ("p50", "p90", "p99", "max"):
        one, other = getattr(told, name), getattr(exact, name)
        assert other * 0.999 - 0.001 <= one <= max(0.011, other * 1.051) + 0.001
    assert gap_bucket(0.0) == 0


def test_failures_and_turns_never_sent_count_against_success() -> None:
    samples = [
        sample(0, 1, route="remote"),
        sample(0, 2, route="local", cached_tokens=15),
        sample(1, 1, error="no end in time", failure=Failure.TIMEOUT, ttft_ms=0.0),
    ]
    told = summarize(samples, PLAN, 2.0, Slo())
    assert (told.planned, told.sent, told.ok, told.failed) == (4, 3, 2, 1)
    assert told.failures == {"timeout": 1}
    assert told.success_rate == 0.5
    assert not told.valid
    assert told.turns_per_s == 1.0
    assert told.output_tokens_per_s == 5.0
    assert told.routes == {"remote": 1, "local": 1}
    assert told.cached_share == 0.6
    assert told.latencies["all"].ttft_ms is not None
    assert told.latencies["all"].ttft_ms.n == 2
    assert told.latencies["later"].turns == 1
    assert told.goodput_turns_per_s is None
    assert any("50.0% of the turns succeeded" in note for note in told.notes)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=100), 3),
        (Slo(ttft_ms=99), 1),
        (Slo(tpot_ms=10), 3),
        (Slo(tpot_ms=9), 1),
        (Slo(ttft_ms=60, tpot_ms=60), 1),
    ],
)
def test_goodput_counts_turns_that_met_all_targets(slo: Slo, good: int) -> None:
    samples = [
        sample(0, 1),
        sample(0, 2),
        sample(1, 1, ttft_ms=50.0, output_tokens=1, tpot_ms=0.0),
        sample(1, 2, ttft_ms=1.0, tpot_ms=1.0, error="x", failure=Failure.SHORT),
    ]
    told = summarize(samples, PLAN, 10.0, slo)
    assert told.goodput_turns_per_s == good / 10
    assert told.slo_share == good / 4
    assert told.latencies["all"].tpot_ms is not None
    assert told.latencies["all"].tpot_ms.n == 2, "one token has no TPOT"


def test_a_late_client_is_reported() -> None:
    on_time = summarize([sample(late_ms=1.0)] * 4, PLAN, 1.0, Slo())
    assert not any("fell behind" in note for note in on_time.notes)
    late = summarize([sample(late_ms=50.0)] * 4, PLAN, 1.0, Slo())
    assert late.late_ms is not None
    assert late.late_ms.p99 == 50
    assert any("sends were 50 ms late" in note for note in late.notes)


def test_a_small_run_is_marked_and_a_large_one_is_not() -> None:
    assert any("reported results take 200" in n for n in summarize([], PLAN, 1, Slo()).notes)
    many = [Conversation(0.0, (PlannedTurn(1, 1),))] * 200
    samples = [sample(number) for number in range(200)]
    assert summarize(samples, many, 60.0, Slo(ttft_ms=1000)).notes == ()


def test_an_empty_run_is_reported_without_a_division_by_zero() -> None:
    told = summarize([], [], 0.0, Slo(ttft_ms=1))
    assert told.success_rate == 0
    assert told.late_ms is None
    assert told.cached_share is None
    assert math.isfinite(told.turns_per_s)
