"""Whether seeds tell which route is better."""

from __future__ import annotations

import pytest

from eval.certainty import Certainty, certainty, mean_score, noisy
from ppd.score import Weights
from ppd.table import Costs

EVEN = Weights()


@pytest.mark.parametrize(
    ("points", "error", "weights", "judged"),
    [
        (0.4, 0.1, EVEN, Certainty.SURE),
        (-0.4, 0.2, EVEN, Certainty.SURE),
        (0.1, 0.2, EVEN, Certainty.TIE),
        (0.1, 0.21, EVEN, Certainty.NOISE),
        (0.1, 0.21, Weights(ttft=3.0), Certainty.TIE),
    ],
)
def test_a_tie_costs_at_most_a_quarter(
    points: float, error: float, weights: Weights, judged: Certainty
) -> None:
    """A remote turn costs 2 at even weights, and 4 at 3:1."""
    assert certainty(points, error, weights) is judged


def test_the_error_is_that_of_the_mean() -> None:
    assert mean_score([0.1, 0.3]) == pytest.approx((0.2, 0.1))


def costs(ttft_ms: float) -> Costs:
    return Costs(ttft_ms, 10.0, 1.0, 1.0)


def test_cells_need_seeds_where_these_disagree() -> None:
    """What both routes have in common with a seed is no noise."""
    agreed = [(costs(100.0), costs(50.0)), (costs(400.0), costs(202.0))]
    disagreed = [(costs(100.0), costs(50.0)), (costs(100.0), costs(140.0))]
    once = [(costs(100.0), costs(99.0))]
    assert noisy({(0, 0, 0, 0): agreed, (0, 0, 1, 0): disagreed, (0, 0, 2, 0): once}) == {
        (0, 0, 1, 0)
    }


def test_cells_need_seeds_where_a_cost_falls() -> None:
    less = [(costs(100.0), costs(30.0)), (costs(101.0), costs(31.0))]
    more = [(costs(60.0), costs(31.0)), (costs(61.0), costs(32.0))]
    assert noisy({(0, 0, 0, 0): less, (0, 1, 0, 0): more}) == {(0, 0, 0, 0), (0, 1, 0, 0)}
    assert noisy({(0, 0, 0, 0): more, (0, 1, 0, 0): less}) == set()
