"""The time of a decode step: that of a cell, until turns have shown the batch's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.step_time import StepTime

LEAST_MS = 6.0


def shown(running: int, tpot_ms: float, turns: int = 500) -> StepTime:
    found = StepTime()
    for _ in range(turns):
        found.note(running, tpot_ms, 8.0, 9.0)
    return found


def test_without_turns_it_is_the_cells() -> None:
    assert StepTime().of(10, 8.0, LEAST_MS) == 8.0


def test_with_turns_it_is_theirs_whatever_the_cell() -> None:
    assert shown(9, 10.0).of(9, 30.0, LEAST_MS) == pytest.approx(10.0, abs=0.01)


def test_a_first_turn_moves_it_little() -> None:
    assert shown(9, 28.0, turns=1).of(9, 8.0, LEAST_MS) == pytest.approx(8.4)


def test_one_stall_counts_as_four_times_the_mean_at_most() -> None:
    assert shown(9, 3000.0, turns=1).of(9, 8.0, LEAST_MS) == pytest.approx(8.0 + 3 * 8.0 / 50)


def test_a_start_on_an_idle_worker_says_little_of_a_batch() -> None:
    """The cell's TPOT of 8 ms is that of ten requests."""
    assert shown(0, 6.0, turns=1).of(9, 8.0, LEAST_MS) == pytest.approx(8.0, abs=0.1)


def test_a_larger_batch_takes_longer_by_as_much_as_it_is_larger() -> None:
    found = shown(9, 10.0)
    alone, twice = found.of(0, 8.0, LEAST_MS), found.of(19, 8.0, LEAST_MS)
    assert alone == pytest.approx(6.4, abs=0.01)
    assert twice == pytest.approx(14.0, abs=0.01)


def test_reset_discards() -> None:
    found = shown(9, 10.0)
    found.reset()
    assert found.of(9, 30.0, LEAST_MS) == 30.0


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0.01, 1.0))
def test_steps_that_are_linear_in_the_batch_are_found(
    before: int, now: int, request_ms: float
) -> None:
    tpot_ms = LEAST_MS + request_ms * (before + 1)
    found = shown(before, tpot_ms, turns=2000).of(now, 8.0, LEAST_MS)
    assert found == pytest.approx(LEAST_MS + request_ms * (now + 1), rel=1e-6)
