"""What a local turn costs later: a remote turn catches up, or all later turns stay local."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.catch_up import CatchUp
from ppd.decision import Route

MS = st.floats(0, 1e6)


def usual(route: Route, longer_ms: float, turns: int = 500, *, held: bool = True) -> CatchUp:
    found = CatchUp()
    for _ in range(turns):
        found.note(0, route, longer_ms, held=held)
    return found


def later_ms(found: CatchUp, turn: int, left_ms: float, longer_ms: float) -> float:
    return found.later_ms(0, turn, left_ms, longer_ms)


def test_where_remote_turns_are_usual_one_of_them_catches_up() -> None:
    # Of 50 turns there are 50 more in the mean: staying local would cost a second.
    remote = usual(Route.REMOTE, 20.0)
    assert later_ms(remote, 50, 110.0, 20.0) == pytest.approx(110 * 50 / 51, abs=0.01)
    assert later_ms(usual(Route.LOCAL, 20.0), 50, 110.0, 20.0) < 0.2


def test_more_is_not_caught_up_than_remote_turns_win() -> None:
    assert later_ms(usual(Route.REMOTE, 2.0), 10, 5000.0, 2.0) == pytest.approx(10 * 2)


def test_where_local_turns_are_shorter_they_cost_nothing_later() -> None:
    for route in (Route.REMOTE, Route.LOCAL):
        assert later_ms(usual(route, -3.0), 10, 500.0, -3.0) == 0


def test_a_turn_that_is_long_for_itself_counts_at_once() -> None:
    """A mean of short turns says nothing of an append that is far longer than a transfer."""
    assert later_ms(usual(Route.REMOTE, -3.0), 10, 500.0, 40.0) == pytest.approx(400.0)


def test_a_turn_that_has_to_be_remote_catches_up_however_short_local_ones_are() -> None:
    found = usual(Route.LOCAL, -3.0)
    for _ in range(50):
        found.note(0, Route.REMOTE, None, held=True)
    assert found.share(0) < 0.01, "of those that could be local"
    forced = 1 - (49 / 50) ** 50
    expected = 500 * (10 / 11) * forced / (1 - (10 / 11) * (1 - forced))
    assert later_ms(found, 10, 500.0, -3.0) == pytest.approx(expected)


def test_nothing_is_caught_up_where_prefixes_are_evicted_before() -> None:
    found = usual(Route.REMOTE, 20.0, held=False)
    for _ in range(50):
        found.note(0, Route.REMOTE, None, held=False)
    assert later_ms(found, 10, 500.0, 20.0) == pytest.approx(0, abs=0.1)
    for _ in range(500):
        found.note(0, Route.REMOTE, 20.0, held=True)
    assert later_ms(found, 10, 100.0, 20.0) == pytest.approx(1000 / 11, abs=0.1)


def test_cells_are_apart_and_reset_discards() -> None:
    found = usual(Route.REMOTE, 10.0)
    assert found.share(0) > 0.99
    assert found.share(1) == 0.2
    found.reset()
    assert later_ms(found, 5, 100.0, 4.0) == later_ms(CatchUp(), 5, 100.0, 4.0)


@given(MS, st.floats(-1e4, 1e4), st.integers(1, 10**6), st.sampled_from(list(Route)))
def test_never_more_is_caught_up_than_there_is(
    left_ms: float, longer_ms: float, turn: int, route: Route
) -> None:
    assert 0 <= later_ms(usual(route, longer_ms, 60), turn, left_ms, longer_ms) <= left_ms
