"""Algorithm 1 and the targets."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ppd.score import Targets, Weights, chance, local_within_noise, score, standard_error
from ppd.table import Costs, Noise


def costs(ttft_ms: float, tpot_ms: float, tail: float = 2.0, tokens_per_s: float = 0.0) -> Costs:
    return Costs(ttft_ms, tpot_ms, tail, tail, tokens_per_s)


FEW = costs(200, 10, tokens_per_s=400)


@pytest.mark.parametrize(
    ("remote", "local", "weights", "points", "prefers_local"),
    [
        # Worked by hand: saves (200-50)/200 = 0.75, loses (12-10)/10 = 0.2.
        (costs(200, 10), costs(50, 12), Weights(1, 1), 0.55, True),
        (costs(200, 10), costs(50, 12), Weights(1, 3), 0.15, True),
        (costs(200, 10), costs(50, 12), Weights(1, 4), -0.05, False),
        (costs(200, 10), costs(50, 12), Weights(0, 1), -0.2, False),
        # Both better, both worse, and a tie, which is not above 0.
        (costs(200, 10), costs(100, 9), Weights(0, 1), 0.1, True),
        (costs(200, 10), costs(300, 11), Weights(1, 1), -0.6, False),
        (costs(200, 10), costs(100, 15), Weights(1, 1), 0.0, False),
        # With throughput: adds (450-400)/400 = 0.125, or loses as much.
        (FEW, costs(100, 15, tokens_per_s=450), Weights(1, 1, 2), 0.25, True),
        (FEW, costs(100, 15, tokens_per_s=350), Weights(1, 1, 2), -0.25, False),
        (FEW, costs(900, 99, tokens_per_s=450), Weights(0, 0, 1), 0.125, True),
        # Without throughput its weight counts nothing.
        (costs(200, 10), costs(50, 12), Weights(1, 1, 100), 0.55, True),
    ],
)
def test_algorithm_1(
    remote: Costs, local: Costs, weights: Weights, points: float, prefers_local: bool
) -> None:
    result = score(weights, remote, local)
    assert result.local == pytest.approx(points)
    assert result.remote == 0.0
    assert result.prefers_local is prefers_local


positive = st.floats(0.1, 1e5)
any_costs = st.builds(Costs, positive, positive, st.floats(1, 20), st.floats(1, 20), positive)
weight = st.floats(0, 100)


@given(any_costs, any_costs, weight, weight, st.floats(0, 10))
def test_more_weight_on_ttft_never_turns_away_from_the_faster_first_token(
    remote: Costs, local: Costs, ttft: float, tpot: float, more: float
) -> None:
    before = score(Weights(ttft, tpot), remote, local)
    after = score(Weights(ttft + more, tpot), remote, local)
    if before.ttft_saved >= 0:
        assert after.prefers_local or not before.prefers_local
    else:
        assert before.prefers_local or not after.prefers_local


@given(any_costs, any_costs, weight, weight, st.floats(0, 10))
def test_more_weight_on_tpot_never_turns_away_from_the_steadier_decode(
    remote: Costs, local: Costs, ttft: float, tpot: float, more: float
) -> None:
    before = score(Weights(ttft, tpot), remote, local)
    after = score(Weights(ttft, tpot + more), remote, local)
    if before.tpot_lost >= 0:
        assert before.prefers_local or not after.prefers_local
    else:
        assert after.prefers_local or not before.prefers_local


@given(any_costs, any_costs, weight, weight, weight, st.floats(0, 10))
def test_more_weight_on_throughput_never_turns_away_from_the_higher_one(
    remote: Costs, local: Costs, ttft: float, tpot: float, throughput: float, more: float
) -> None:
    before = score(Weights(ttft, tpot, throughput), remote, local)
    after = score(Weights(ttft, tpot, throughput + more), remote, local)
    if before.throughput_gained >= 0:
        assert after.prefers_local or not before.prefers_local
    else:
        assert before.prefers_local or not after.prefers_local


@pytest.mark.parametrize(("noise", "local"), [(0.02, False), (0.06, True)])
def test_a_throughput_within_its_noise_is_no_reason_to_transfer(noise: float, local: bool) -> None:
    measured = costs(200, 10, tokens_per_s=380)  # 5 % fewer
    uncertain = Noise(0.0, 0.0, noise)
    assert local_within_noise(Weights(0, 0, 1), FEW, measured, measured, uncertain) is local
    assert standard_error(Weights(9, 9, 2), FEW, measured, uncertain) == pytest.approx(1.9 * noise)


def test_chances_follow_median_and_99th_percentile() -> None:
    measured = costs(100, 10, tail=3.0)
    assert chance(Targets(ttft_ms=100), measured) == pytest.approx(0.5)
    assert chance(Targets(ttft_ms=300), measured) == pytest.approx(0.99)
    assert chance(Targets(ttft_ms=300, tpot_ms=10), measured) == pytest.approx(0.495)
    assert chance(Targets(tpot_ms=1e9), measured) == pytest.approx(1.0)
    steady = Costs(100, 10, 1.0, 1.0)
    assert chance(Targets(ttft_ms=99), steady) == 0.0
    assert chance(Targets(ttft_ms=100), steady) == 1.0


def test_targets_choose_what_is_more_likely_to_meet_them() -> None:
    remote, local = costs(400, 10), costs(100, 14)
    assert score(Targets(ttft_ms=200, tpot_ms=50), remote, local).prefers_local
    assert not score(Targets(ttft_ms=2000, tpot_ms=12), remote, local).prefers_local
    # Nothing to choose between: as with even weights (saves 0.75, loses 0.4).
    assert score(Targets(ttft_ms=1e300), remote, local).prefers_local


@given(any_costs, any_costs, positive, positive)
def test_targets_are_total(remote: Costs, local: Costs, ttft_ms: float, tpot_ms: float) -> None:
    result = score(Targets(ttft_ms, tpot_ms), remote, local)
    assert 0 <= result.remote <= 1
    assert 0 <= result.local <= 1
    if not math.isclose(result.remote, result.local):
        assert result.prefers_local is (result.local > result.remote)


@given(any_costs, st.floats(1, 1e4), st.floats(1, 10))
def test_a_looser_target_is_never_less_likely_met(
    measured: Costs, ttft_ms: float, by: float
) -> None:
    assume(by > 1)
    assert chance(Targets(ttft_ms * by), measured) >= chance(Targets(ttft_ms), measured)
