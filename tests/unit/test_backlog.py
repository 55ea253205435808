"""Queues of prefill workers: tokens are given back exactly, and waits follow the workers' times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.backlog import NO_WORK, Backlog, Queued, Work


class Clock:
    """Time that the test sets, in ms."""

    now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms / 1e3


def queues() -> tuple[Clock, Backlog]:
    clock = Clock()
    return clock, Backlog(clock)


def test_prompts_are_computed_one_after_the_other() -> None:
    clock, backlog = queues()
    assert backlog.wait_ms("p", 10.0) == 0
    backlog.add("p", 100, Work(40.0))
    clock.now_ms = 30.0
    backlog.add("p", 50, Work(20.0))
    assert backlog.wait_ms("p", 10.0) == pytest.approx(30)
    assert backlog.wait_ms("q", 10.0) == 0
    clock.now_ms = 50.0
    assert backlog.wait_ms("p", 10.0) == pytest.approx(20), "the first is late, so both are"


def test_what_is_computed_and_not_answered_delays_nothing() -> None:
    clock, backlog = queues()
    backlog.add("p", 100, Work(40.0))
    clock.now_ms = 70.0
    assert backlog.wait_ms("p", 10.0) == 0
    backlog.add("p", 100, Work(25.0))
    assert backlog.wait_ms("p", 10.0) == pytest.approx(25)


def test_a_turn_waits_for_the_link_after_it_is_computed() -> None:
    _, backlog = queues()
    backlog.add("p", 1000, Work(50.0, 80.0))
    assert backlog.wait_ms("p", 10.0) == pytest.approx(120), "KV of the first is sent until 130"
    assert backlog.wait_ms("p", 200.0) == pytest.approx(50), "the link is free by then"


def test_an_early_answer_shortens_the_wait() -> None:
    clock, backlog = queues()
    first = backlog.add("p", 100, Work(500.0, 30.0))
    backlog.add("p", 100, Work(20.0, 5.0))
    clock.now_ms = 100.0
    backlog.remove(first)
    assert backlog.wait_ms("p", 100.0) == 0, "begun 30 ms ago, when the first was computed"
    assert backlog.wait_ms("p", 0.0) == pytest.approx(5)


def test_a_late_answer_shows_when_the_next_prompt_was_begun() -> None:
    clock, backlog = queues()
    first = backlog.add("p", 100, Work(50.0, 30.0))
    backlog.add("p", 1000, Work(200.0, 150.0))
    clock.now_ms = 300.0
    before_ms = backlog.wait_ms("p", 300.0)
    backlog.remove(first)
    after_ms = backlog.wait_ms("p", 300.0)
    assert before_ms == after_ms == pytest.approx(170), "begun while the KV was sent"
    assert backlog.wait_ms("p", 10.0) == pytest.approx(170 + 150 - 10), "then its KV is sent"


def test_a_worker_that_does_not_answer_is_not_idle() -> None:
    clock, backlog = queues()
    for _ in range(20):
        backlog.add("p", 1000, Work(50.0))
    clock.now_ms = 1100.0
    assert backlog.wait_ms("p", 0.0) == pytest.approx(19 * 50)


def test_answers_that_wait_for_the_link_say_nothing_of_prompts() -> None:
    clock, backlog = queues()
    first = backlog.add("p", 100, Work(10.0, 100.0))
    second = backlog.add("p", 100, Work(10.0, 100.0))
    backlog.add("p", 100, Work(150.0, 100.0))
    for turn, at_ms in ((first, 110.0), (second, 210.0)):
        clock.now_ms = at_ms
        backlog.remove(turn)
    assert backlog.wait_ms("p", 300.0) == 0, "computed since 170"
    assert backlog.wait_ms("p", 0.0) == pytest.approx(100), "its KV is being sent"


def test_a_turn_that_leaves_from_behind_prolongs_nothing() -> None:
    clock, backlog = queues()
    backlog.add("p", 100, Work(100.0))
    last = backlog.add("p", 100, Work(100.0))
    clock.now_ms = 90.0
    backlog.remove(last)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(10), "the rest of the first"


def test_those_behind_a_turn_that_leaves_are_computed_earlier() -> None:
    """An answer as early as that is none that shortens the wait of turns that came later."""
    clock, backlog = queues()
    first, leaves, third = (backlog.add("p", 1000, Work(1000.0)) for _ in range(3))
    clock.now_ms = 500.0
    backlog.remove(leaves)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(1500)
    clock.now_ms = 1000.0
    backlog.remove(first)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(1000)
    clock.now_ms = 1500.0
    backlog.add("p", 1000, Work(1000.0))
    clock.now_ms = 2000.0
    backlog.remove(third)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(1000)


def test_a_link_is_free_of_what_a_turn_that_leaves_would_have_sent() -> None:
    clock, backlog = queues()
    backlog.add("p", 100, Work(10.0, 100.0))
    leaves = backlog.add("p", 100, Work(10.0, 100.0))
    backlog.add("p", 100, Work(10.0, 100.0))
    clock.now_ms = 50.0
    assert backlog.wait_ms("p", 0.0) == pytest.approx(260)
    backlog.remove(leaves)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(160)


def test_a_turn_that_leaves_behind_a_late_one_takes_its_own_time_along() -> None:
    clock, backlog = queues()
    backlog.add("p", 100, Work(10.0))
    leaves = backlog.add("p", 100, Work(20.0))
    clock.now_ms = 300.0  # the first is late by 290 ms
    backlog.add("p", 100, Work(50.0))
    assert backlog.wait_ms("p", 0.0) == pytest.approx(70)
    backlog.remove(leaves)
    assert backlog.wait_ms("p", 0.0) == pytest.approx(50)


def test_turns_whose_answers_come_late_leave_by_their_plan() -> None:
    """Behind a gateway a whole answer begins when its reply ends, twenty seconds later."""
    clock, backlog = queues()
    turns = []
    for _ in range(20):
        turns.append(backlog.add("p", 1000, Work(300.0), has_answer=False))
        assert backlog.wait_ms("p", 0.0) == pytest.approx(300)
        clock.now_ms += 1000.0
        assert (backlog.wait_ms("p", 0.0), backlog.of("p"), backlog.all()) == (0, 0, {})
    for turn in turns:
        backlog.remove(turn)
    first, second = (backlog.add("p", 10, Work(100.0), has_answer=False) for _ in range(2))
    backlog.remove(first)  # its client left
    assert backlog.of("p") == 10
    clock.now_ms += 150.0
    backlog.add("p", 10, Work(100.0))
    assert backlog.of("p") == 10
    backlog.remove(second)
    untimed = backlog.add("q", 10, has_answer=False)
    clock.now_ms += 1e6
    assert backlog.of("q") == 10, "without a table its time is not known"
    backlog.remove(untimed)
    assert backlog.of("q") == 0


works = st.tuples(st.integers(0, 1000), st.floats(0, 1e4), st.floats(0, 1e4))


@given(st.lists(st.tuples(works, st.integers(0, 5), st.floats(0, 1e4), st.booleans()), max_size=40))
def test_all_that_was_added_is_given_back(
    steps: list[tuple[tuple[int, float, float], int, float, bool]],
) -> None:
    clock, backlog = queues()
    under_way: list[Queued] = []
    for (tokens, compute_ms, transfer_ms), place, later_ms, one_ends in steps:
        clock.now_ms += later_ms
        under_way.append(backlog.add("p", tokens, Work(compute_ms, transfer_ms)))
        if one_ends:
            backlog.remove(under_way.pop(place % len(under_way)))
        assert backlog.of("p") == sum(turn.tokens for turn in under_way)
        left_ms = sum(sum(turn.work) for turn in under_way)
        assert 0 <= backlog.wait_ms("p", 0.0) <= left_ms + 1e-3, "no more than all that is left"
    for turn in under_way:
        backlog.remove(turn)
    assert backlog.all() == {}
    assert backlog.wait_ms("p", 0.0) == 0


def test_without_times_nothing_waits() -> None:
    _, backlog = queues()
    assert backlog.add("p", 7).work == NO_WORK
    assert backlog.wait_ms("p", 0.0) == 0
