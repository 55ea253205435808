"""The pool's scheduler and control loop: pure, so any history can be played."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.ann.control import Aims, ControlLoop, Feedback, Move
from ppd.ann.schedule import MAX_RESERVED, Bounds, Controls, Room, Scheduler, Stage, Ticket
from ppd.errors import Overloaded

PLENTY = 10_000
P, D = Stage.PREFILL, Stage.DECODE


def side_by_side(slots: int) -> Room:
    """The room of a device whose searches advance together."""
    return Room(slots, float(slots), 1.0, mixed=True)


def core(work: float = 10.0, each: float = 10.0, slots: int = 4) -> Room:
    """The room of a core, which serves one search after the other."""
    return Room(slots, work, each, mixed=False)


def scheduler(
    reserved: float = 0.5,
    bounds: Bounds = Bounds(PLENTY, PLENTY),  # noqa: B008
) -> Scheduler[Ticket]:
    """A step takes one second."""
    return Scheduler(bounds, Controls(reserved), lambda: 1.0)


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
        one.offer(ticket(P, deadline_s=float(deadline)))
    feasible = all(
        sum(deadline <= until for deadline in deadlines) <= slots * until for until in range(1, 13)
    )
    late = 0
    for now in range(len(deadlines)):
        for done in one.choose(side_by_side(slots), slots, []):
            late += done.deadline_s < now + 1
    assert one.waiting(P) == 0
    assert (late == 0) == feasible


def on_a_core(
    one: Scheduler[Ticket], arrivals: Sequence[tuple[float, Ticket]], room: Room, lanes: int
) -> dict[int, float]:
    """Serve all on one core, where an expansion takes a second; returns when each one ends."""
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    running: list[Ticket] = []
    ends_s: dict[int, float] = {}
    now_s = 0.0
    while left or running or one.all_waiting():
        while left and left[0][0] <= now_s:
            one.offer(left.pop(0)[1])
        chosen = one.choose(room, lanes - len(running), running)
        if not chosen:
            now_s = left[0][0]
            continue
        assert len({each.stage for each in chosen}) == 1, "a search waits for the other stage's"
        assert len(chosen) <= room.slots
        assert len(chosen) == 1 or sum(map(room.work_of, chosen)) <= room.work
        running += [new for new in chosen if new not in running]
        for each in chosen:
            done = room.work_of(each)
            now_s += done
            each.steps_left -= done
        for each in [each for each in running if each.steps_left <= 0]:
            running.remove(each)
            ends_s[id(each)] = now_s
    return ends_s


def edf_lateness(arrivals: Sequence[tuple[float, Ticket]]) -> float:
    """The least maximum lateness there is: earliest deadline first, preempted at any time."""
    events = sorted({at_s for at_s, _ in arrivals})
    left = {id(each): each.steps_left for _, each in arrivals}
    now_s, worst = 0.0, -math.inf
    while any(left.values()):
        ready = [each for at_s, each in arrivals if at_s <= now_s and left[id(each)]]
        upcoming = [at_s for at_s in events if at_s > now_s]
        if not ready:
            now_s = upcoming[0]
            continue
        first = min(ready, key=lambda each: each.deadline_s)
        runs = min([left[id(first)], *(at_s - now_s for at_s in upcoming[:1])])
        left[id(first)] -= runs
        now_s += runs
        if not left[id(first)]:
            worst = max(worst, now_s - first.deadline_s)
    return worst


@given(
    searches=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 80)),
        min_size=1,
        max_size=20,
    ),
    work=st.integers(1, 20),
    slots=st.integers(1, 5),
)
def test_on_a_core_no_deadline_is_missed_by_more_than_a_step_beyond_edf(
    searches: list[tuple[int, int, int]], work: int, slots: int
) -> None:
    """A search waits at most for the step under way, and for those beside it in its last one.

    A core's own step has one search (``StepShape``), so that nothing is beside it.
    """
    arrivals = [
        (float(at), ticket(P, arrived_s=at, deadline_s=at + within, steps=steps))
        for at, steps, within in searches
    ]
    best = edf_lateness(arrivals)
    ends_s = on_a_core(scheduler(), arrivals, core(work, work, slots), lanes=100)
    worst = max(ends_s[id(each)] - each.deadline_s for _, each in arrivals)
    assert worst <= best + (1 if slots == 1 else 2) * work


@given(
    prefill=st.lists(st.integers(1, 12), min_size=40, max_size=60),
    decode=st.lists(st.integers(1, 30), min_size=40, max_size=60),
    reserved=st.floats(0, 1),
    work=st.integers(4, 16),
)
def test_on_a_core_decode_gets_its_share_while_both_stages_wait(
    prefill: list[int], decode: list[int], reserved: float, work: int
) -> None:
    one, room = scheduler(reserved), core(work, work)
    share = 1.0 - min(reserved, MAX_RESERVED)
    for stage, some in ((P, prefill), (D, decode)):
        for steps in some:
            one.offer(ticket(stage, steps=steps))
    done = dict.fromkeys(Stage, 0.0)
    running: list[Ticket] = []
    while all(
        one.waiting(stage) or any(each.stage is stage for each in running) for stage in Stage
    ):
        for each in one.choose(room, 100 - len(running), running):
            if each not in running:
                running.append(each)
            done[each.stage] += room.work_of(each)
            each.steps_left -= room.work_of(each)
        running = [each for each in running if each.steps_left > 0]
        assert done[D] >= share * sum(done.values()) - 2 * work, "decode starves"
        assert done[D] <= share * sum(done.values()) + 2 * work, "prefill does not go first"


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(Stage), st.integers(0, 20), st.integers(1, 5)),
        min_size=1,
        max_size=40,
    ),
    slots=st.integers(1, 5),
    lanes=st.integers(1, 8),
    reserved=st.floats(0, MAX_RESERVED),
)
@example(  # a prefill that begins takes the last lane before one that runs, and decode has none
    arrivals=[(P, 4, 5), (P, 8, 1), (P, 8, 2), (D, 5, 5), (D, 5, 1)],
    slots=2,
    lanes=2,
    reserved=0.5,
)
def test_no_slot_is_idle_and_everybody_is_served(
    arrivals: list[tuple[Stage, int, int]], slots: int, lanes: int, reserved: float
) -> None:
    one = scheduler(reserved)
    left = sorted(arrivals, key=lambda arrival: arrival[1])
    running: list[Ticket] = []
    work = sum(steps for _, _, steps in arrivals)
    for now in itertools.count():
        while left and left[0][1] <= now:
            stage, at, steps = left.pop(0)
            one.offer(ticket(stage, arrived_s=at, deadline_s=at + 50.0, steps=steps))
        ready = len(running) + min(lanes - len(running), one.waiting(P) + one.waiting(D))
        chosen = one.choose(side_by_side(slots), lanes - len(running), running)
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


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(Stage), st.integers(0, 60), st.integers(1, 40)),
        min_size=1,
        max_size=40,
    ),
    lanes=st.integers(1, 8),
    reserved=st.floats(0, 1),
)
def test_on_a_core_everybody_is_served(
    arrivals: list[tuple[Stage, int, int]], lanes: int, reserved: float
) -> None:
    offered = [
        (float(at), ticket(stage, arrived_s=at, steps=steps)) for stage, at, steps in arrivals
    ]
    assert len(on_a_core(scheduler(reserved), offered, core(), lanes)) == len(arrivals)


@given(reserved=st.floats(0.05, MAX_RESERVED), slots=st.integers(1, 16))
def test_the_reservation_is_kept_to_within_a_step(reserved: float, slots: int) -> None:
    one = scheduler(reserved)
    steps = 50
    for _ in range(steps * slots):
        one.offer(ticket(P))
        one.offer(ticket(D))
    of_prefill = 0
    for step in range(1, steps + 1):
        chosen = one.choose(side_by_side(slots), slots, [])
        of_prefill += sum(each.stage is P for each in chosen)
        assert abs(of_prefill - reserved * slots * step) <= (1 - reserved) * slots + 1


@pytest.mark.parametrize("room", [side_by_side(8), core(8.0, slots=8)])
@pytest.mark.parametrize("stage", list(Stage))
def test_a_share_that_is_not_used_is_given_away(stage: Stage, room: Room) -> None:
    one = scheduler(reserved=0.5)
    for _ in range(20):
        one.offer(ticket(stage))
    assert len(one.choose(room, 8, [])) == 8


def test_on_a_core_a_step_has_whole_searches_of_one_stage_that_fit() -> None:
    one = scheduler(MAX_RESERVED)
    decode = [ticket(D, steps=steps) for steps in (4, 6, 1)]
    prefill = [ticket(P, steps=steps) for steps in (4, 7)]
    long = ticket(P, steps=25, deadline_s=2e9)
    for each in (*decode, *prefill, long):
        one.offer(each)
    assert one.choose(core(), 9, []) == prefill[:1]  # the next one would be cut
    assert one.choose(core(), 9, []) == prefill[1:]
    assert one.choose(core(), 9, []) == [long]  # longer than a step: it goes on later
    long.steps_left -= 10
    urgent = ticket(P, steps=3, deadline_s=5.0)
    one.offer(urgent)
    assert one.choose(core(), 9, [long]) == [urgent]
    assert one.choose(core(), 9, [long]) == [long]
    assert one.choose(core(), 9, []) == decode[:2]
    assert one.choose(core(), 9, []) == decode[2:]


def test_the_earlier_deadline_goes_first_even_before_what_has_begun() -> None:
    one = scheduler()
    begun = ticket(P, deadline_s=100.0, steps=10)
    one.offer(begun)
    assert one.choose(side_by_side(1), 4, []) == [begun]
    urgent, less = ticket(P, deadline_s=20.0, steps=5), ticket(P, deadline_s=25.0, steps=15)
    one.offer(less)
    one.offer(urgent)
    assert one.choose(side_by_side(1), 4, [begun]) == [urgent]
    assert one.choose(side_by_side(2), 4, [begun, urgent]) == [urgent, less]


def test_decode_is_served_in_the_order_it_came() -> None:
    one = scheduler()
    tickets = [ticket(Stage.DECODE) for _ in range(5)]
    for each in tickets:
        one.offer(each)
    assert one.choose(side_by_side(2), 4, []) == tickets[:2]
    assert one.choose(side_by_side(3), 4, tickets[1:2]) == tickets[1:4]


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


feedback = st.builds(Feedback, st.floats(0, 1), st.floats(0, 1e4), st.none() | st.floats(0.1, 1e3))


@given(st.lists(feedback, max_size=60))
def test_controls_stay_within_their_bounds(history: list[Feedback]) -> None:
    aims = Aims()
    loop = ControlLoop(aims, Controls())
    for seen in history:
        before = loop.controls
        move = loop.step(seen)
        now = loop.controls
        assert aims.min_reserved <= now.reserved <= aims.max_reserved
        match move:
            case Move.STEADY:
                assert now == before
            case Move.LINK_FREE:
                assert now.reserved > before.reserved
            case Move.LINK_FULL:
                assert now.reserved < before.reserved


@given(start=st.floats(0.05, 0.9), enough=st.floats(0.2, 0.8))
def test_the_loop_settles_where_the_link_is_at_its_target(start: float, enough: float) -> None:
    """A made-up pool: the link is full as soon as ``enough`` is reserved for prefill."""
    loop = ControlLoop(Aims(), Controls(reserved=start))
    for _ in range(80):
        use = min(1.0, 0.98 + 0.1 * (loop.controls.reserved - enough))
        loop.step(Feedback(use, 500.0))
    assert loop.controls.reserved == pytest.approx(enough, abs=0.06)


def test_decode_gets_work_while_it_is_late_and_keeps_it_while_the_link_is_full() -> None:
    loop = ControlLoop(Aims(), Controls())
    assert loop.step(Feedback(0.5, 1e4)) is Move.STEADY
    assert loop.step(Feedback(1.0, 9.0)) is Move.STEADY
    for _ in range(18):
        assert loop.step(Feedback(1.0, 11.0)) in (Move.LINK_FULL, Move.STEADY)
    assert loop.controls.reserved == loop.aims.min_reserved
    assert loop.step(Feedback(1.0, 9.0)) is Move.STEADY
    for _ in range(17):
        assert loop.step(Feedback(0.5, 1e4)) is Move.LINK_FREE
    assert loop.controls.reserved == MAX_RESERVED


def test_a_decode_search_is_late_by_the_tokens_of_its_stream() -> None:
    def move(token_ms: float | None) -> Move:
        return ControlLoop(Aims(), Controls()).step(Feedback(1.0, 9.5, token_ms))

    assert move(None) is move(20.0) is Move.STEADY  # half a token takes 10 ms
    assert move(18.0) is Move.LINK_FULL
