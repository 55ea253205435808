"""What missed tokens cost: a later remote turn computes them, or all later turns stay local."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.catch_up import CatchUp
from ppd.decision import Route

MS = st.floats(0, 1e6)


def usual(route: Route, longer_ms: float, turns: int = 500) -> CatchUp:
    found = CatchUp()
    for _ in range(turns):
        found.note(0, route, longer_ms)
    return found


def test_where_remote_turns_are_usual_what_is_missed_is_no_reason() -> None:
    remote = usual(Route.REMOTE, 20.0)
    # Of 50 turns there are 50 more in the mean: staying local would cost a second.
    assert remote.costs_ms(0, 50, 100.0, 10.0, 20.0) == pytest.approx(
        (0, 110 * 50 / 51 - 100), abs=0.01
    )
    assert usual(Route.LOCAL, 20.0).costs_ms(0, 50, 100.0, 10.0, 20.0)[0] > 99


def test_more_is_not_caught_up_than_remote_turns_win() -> None:
    remote = usual(Route.REMOTE, 2.0)
    assert remote.costs_ms(0, 10, 5000.0, 10.0, 2.0) == pytest.approx((5000 - 10 * 2, 0), abs=0.01)


def test_where_local_turns_are_shorter_nothing_is_owed() -> None:
    for route in (Route.REMOTE, Route.LOCAL):
        assert usual(route, -3.0).costs_ms(0, 10, 0.0, 500.0, -3.0) == (0, 0)


def test_a_turn_that_is_long_for_itself_is_owed_at_once() -> None:
    """A mean of short turns says nothing of an append that is far longer than a transfer."""
    (remote_ms, local_ms) = usual(Route.REMOTE, -3.0).costs_ms(0, 10, 0.0, 500.0, 40.0)
    assert (remote_ms, local_ms) == pytest.approx((0, 400.0))


def test_cells_are_apart_and_reset_discards() -> None:
    found = usual(Route.REMOTE, 10.0)
    assert found.share(0) > 0.99
    assert found.share(1) == 0.2
    fresh = CatchUp()
    found.reset()
    assert found.costs_ms(0, 5, 100.0, 10.0, 4.0) == fresh.costs_ms(0, 5, 100.0, 10.0, 4.0)


@given(MS, MS, st.floats(-1e4, 1e4), st.integers(1, 1000), st.sampled_from(list(Route)))
def test_one_route_at_most_pays_and_never_more_than_there_is(
    missed_ms: float, adds_ms: float, longer_ms: float, turn: int, route: Route
) -> None:
    remote_ms, local_ms = usual(route, longer_ms, 60).costs_ms(
        0, turn, missed_ms, adds_ms, longer_ms
    )
    assert min(remote_ms, local_ms) == 0
    assert 0 <= remote_ms <= missed_ms
    assert 0 <= local_ms <= adds_ms * (1 + 1e-9) + 1e-6
