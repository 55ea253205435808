"""The pool's scheduler and control loop: pure, so any history can be played."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.ann.control import Aims, ControlLoop, Feedback, Move
from ppd.ann.schedule import MAX_RESERVED, Bounds, Controls, Scheduler, Stage, Ticket
from ppd.errors import Overloaded

PLENTY = 10_000


def scheduler(
    reserved: float = 0.5,
    flush_s: float = math.inf,
    bounds: Bounds = Bounds(PLENTY, PLENTY),  # noqa: B008
) -> Scheduler:
    """A step takes one second."""
    return Scheduler(bounds, Controls(reserved, flush_s), lambda: 1.0)


def ticket(
    stage: Stage, *, arrived_s: float = 0.0, deadline_s: float = 1e9, steps: float = 1.0
) -> Ticket:
    return Ticket(stage, arrived_s, deadline_s, steps)


@given(
    deadlines=st.lists(st.integers(1, 12), min_size=1, max_size=24),
    slots=st.integers(1, 4),
)
def test_unit_searches_meet_their_deadlines_whenever_any_order_does(
    deadlines: list[int], slots: int
) -> None:
    one = scheduler()
    for deadline in deadlines:
        one.offer(ticket(Stage.PREFILL, deadline_s=float(deadline)))
    feasible = all(
        sum(deadline <= until for deadline in deadlines) <= slots * until for until in range(1, 13)
    )
    late = 0
    for now in range(len(deadlines)):
        for done in one.choose(float(now), slots, slots, []):
            late += done.deadline_s < now + 1
    assert one.waiting(Stage.PREFILL) == 0
    assert (late == 0) == feasible


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(Stage), st.integers(0, 20), st.integers(1, 5)),
        min_size=1,
        max_size=40,
    ),
    slots=st.integers(1, 5),
    lanes=st.integers(1, 8),
    reserved=st.floats(0, MAX_RESERVED),
    flush_s=st.floats(0, 30),
)
@example(  # a prefill that begins takes the last lane before one that runs, and decode has none
    arrivals=[
        (Stage.PREFILL, 4, 5),
        (Stage.PREFILL, 8, 1),
        (Stage.PREFILL, 8, 2),
        (Stage.DECODE, 5, 5),
        (Stage.DECODE, 5, 1),
    ],
    slots=2,
    lanes=2,
    reserved=0.5,
    flush_s=3.0,
)
def test_no_slot_is_idle_and_everybody_is_served(
    arrivals: list[tuple[Stage, int, int]],
    slots: int,
    lanes: int,
    reserved: float,
    flush_s: float,
) -> None:
    one = scheduler(reserved, flush_s)
    left = sorted(arrivals, key=lambda arrival: arrival[1])
    running: list[Ticket] = []
    work = sum(steps for _, _, steps in arrivals)
    for now in itertools.count():
        while left and left[0][1] <= now:
            stage, at, steps = left.pop(0)
            one.offer(ticket(stage, arrived_s=at, deadline_s=at + 50.0, steps=steps))
        ready = len(running) + min(
            lanes - len(running), one.waiting(Stage.PREFILL) + one.waiting(Stage.DECODE)
        )
        chosen = one.choose(float(now), slots, lanes - len(running), running)
        assert len(chosen) == len(set(map(id, chosen))) == min(slots, ready)
        running += [new for new in chosen if new not in running]
        assert len(running) <= lanes
        for each in chosen:
            each.steps_left -= 1
            work -= 1
        running = [each for each in running if each.steps_left > 0]
        if not left and not running and not work:
            break
        assert now < 20 + sum(steps for _, _, steps in arrivals), "somebody starves"


@given(reserved=st.floats(0.05, MAX_RESERVED), slots=st.integers(1, 16))
def test_the_reservation_is_kept_to_within_a_slot(reserved: float, slots: int) -> None:
    one = scheduler(reserved)
    steps = 50
    for _ in range(steps * slots):
        one.offer(ticket(Stage.PREFILL))
        one.offer(ticket(Stage.DECODE))
    of_prefill = 0
    for now in range(steps):
        chosen = one.choose(float(now), slots, slots, [])
        of_prefill += sum(each.stage is Stage.PREFILL for each in chosen)
        assert abs(of_prefill - reserved * slots * (now + 1)) <= slots * 0.1 + 2


@pytest.mark.parametrize("stage", list(Stage))
def test_a_share_that_is_not_used_is_given_away(stage: Stage) -> None:
    one = scheduler(reserved=0.5)
    for _ in range(20):
        one.offer(ticket(stage))
    assert len(one.choose(0.0, 8, 8, [])) == 8


def test_flushed_prefill_goes_first_but_leaves_decode_a_slot_in_ten() -> None:
    one = scheduler(reserved=0.1, flush_s=2.0)
    for _ in range(1000):
        one.offer(ticket(Stage.PREFILL))
        one.offer(ticket(Stage.DECODE))
    fresh = [each.stage for each in one.choose(1.0, 10, 10, [])]
    assert fresh.count(Stage.PREFILL) == 1
    flushed = [each.stage for _ in range(10) for each in one.choose(2.0, 10, 10, [])]
    assert flushed.count(Stage.DECODE) == 10


def test_less_slack_goes_first_even_before_what_has_begun() -> None:
    one = scheduler()
    begun = ticket(Stage.PREFILL, deadline_s=100.0, steps=10)
    one.offer(begun)
    assert one.choose(0.0, 1, 4, []) == [begun]
    urgent = ticket(Stage.PREFILL, deadline_s=20.0, steps=5)
    long = ticket(Stage.PREFILL, deadline_s=25.0, steps=15)
    one.offer(urgent)
    one.offer(long)
    assert one.choose(1.0, 1, 4, [begun]) == [long]
    assert one.choose(1.0, 1, 4, [begun, long]) == [long]
    assert one.choose(1.0, 2, 4, [begun, long]) == [long, urgent]


def test_decode_is_served_in_the_order_it_came() -> None:
    one = scheduler()
    tickets = [ticket(Stage.DECODE) for _ in range(5)]
    for each in tickets:
        one.offer(each)
    assert one.choose(0.0, 2, 4, []) == tickets[:2]
    assert one.choose(0.0, 3, 4, tickets[1:2]) == tickets[1:4]


def test_what_waits_too_long_is_given_back_once() -> None:
    one = scheduler()
    late = [ticket(stage, deadline_s=5.0) for stage in Stage]
    for each in (*late, ticket(Stage.PREFILL, deadline_s=9.0)):
        one.offer(each)
    assert one.expired(4.9, 9) == []
    assert one.expired(5.0, 9) == late
    assert one.expired(5.0, 9) == []
    assert one.waiting(Stage.PREFILL) == 1


def test_queues_are_bounded_and_take_all_of_a_request_or_none() -> None:
    one = scheduler(bounds=Bounds(prefill=2, decode=1))
    one.offer(ticket(Stage.PREFILL))
    with pytest.raises(Overloaded) as refused:
        one.offer_all([ticket(Stage.PREFILL, steps=30), ticket(Stage.PREFILL, steps=30)])
    assert refused.value.retry_after_s == 30
    assert one.waiting(Stage.PREFILL) == 1
    one.offer(ticket(Stage.DECODE))
    with pytest.raises(Overloaded):
        one.offer(ticket(Stage.DECODE))


feedback = st.builds(Feedback, st.floats(0, 1), st.floats(0, 1e4), st.floats(0, 1))


@given(st.lists(feedback, max_size=60))
def test_controls_stay_within_their_bounds(history: list[Feedback]) -> None:
    aims = Aims()
    loop = ControlLoop(aims, Controls())
    for seen in history:
        before = loop.controls
        move = loop.step(seen)
        now = loop.controls
        assert aims.min_reserved <= now.reserved <= aims.max_reserved
        assert aims.min_flush_s <= now.flush_s <= aims.max_flush_s
        match move:
            case Move.STEADY:
                assert now == before
            case Move.PREFILL_WAITS:
                assert now.reserved >= before.reserved
                assert now.flush_s <= before.flush_s
            case Move.DECODE_STALLS | Move.LINK_BUSY:
                assert now.reserved <= before.reserved
                assert now.flush_s >= before.flush_s


@given(start=st.floats(0.05, 0.9), balance=st.floats(0.2, 0.7))
def test_the_loop_settles_where_both_suffer_alike(start: float, balance: float) -> None:
    """A made-up pool: prefill waits less and decode stalls more, the more is reserved."""
    aims = Aims()
    loop = ControlLoop(aims, Controls(reserved=start))
    moves = []
    for _ in range(80):
        surplus = loop.controls.reserved - balance
        seen = Feedback(
            kv_link_use=0.3,
            prefill_wait_p95_ms=aims.prefill_wait_p95_ms * 2 ** (0.5 - 3 * surplus),
            decode_stall=aims.decode_stall * 2 ** (0.5 + 3 * surplus),
        )
        moves.append(loop.step(seen))
    assert abs(loop.controls.reserved - balance) < 0.1
    assert set(moves[-20:]) == {Move.STEADY}


def test_a_busy_link_gives_prefill_no_more() -> None:
    loop = ControlLoop(Aims(), Controls(reserved=0.5))
    assert loop.step(Feedback(0.99, 1000.0, 0.0)) is Move.LINK_BUSY
    assert loop.controls.reserved < 0.5
