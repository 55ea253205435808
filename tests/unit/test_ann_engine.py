"""Searches of many kinds through one engine: each ends as it would alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ppd.ann import batch
from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.lanes import Backend, LaneSet, Target, cpu_backend
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage
from ppd.ann.searches import Ending, Found, Search, steps_of
from ppd.ann.snapshot import Snapshot
from ppd.errors import IndexFileError

from .ann_fixtures import clustered, made, target_of, truth

ROWS = clustered(3000, 32, 40, 0)
QUERIES = ROWS[:600] + np.float32(0.1)
CPU = cpu_backend()
TARGET = target_of(made(ROWS))


class Clock:
    """Moves by a millisecond each time it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def engine_and_scheduler(
    clock: Clock,
    backend: Backend = CPU,
    shape: StepShape = StepShape(slots=6, expansions=90, each=30),  # noqa: B008
    engines: int = 1,
) -> tuple[Engine, Scheduler[Search]]:
    pace = Pace()
    scheduler: Scheduler[Search] = Scheduler(Bounds(), Controls(), lambda: pace.expansion_s)
    return Engine(scheduler, pace, clock, shape, backend, 256, engines), scheduler


def asked(
    number: int,
    itopk: int,
    stage: Stage = Stage.DECODE,
    target: Target = TARGET,
    deadline_s: float = math.inf,
    among: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None,
) -> Search:
    return Search(
        stage,
        0.0,
        deadline_s,
        steps_of(itopk, among),
        target=target,
        query=target.snapshot.space.queries(QUERIES[number : number + 1]),
        itopk=itopk,
        limit=min(10, itopk),
        among=among,
    )


def run(engine: Engine, clock: Clock, count: int) -> list[Found]:
    ended: list[Found] = []
    while len(ended) < count:
        chosen, late = engine.choose(clock())
        assert chosen or late, "a search is lost"
        ended += engine.step(chosen, late)
        assert len(engine.running) < CPU.lanes
    return ended


def test_mixed_searches_of_two_targets_find_what_they_find_alone() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock)
    hidden = (np.arange(3000) % 3 == 0).astype(np.uint8)
    other = Target(TARGET.snapshot, hidden)
    widths = (4, 16, 64, 200)
    searches = [
        asked(i, widths[i % 4], list(Stage)[i % 2], (TARGET, other)[i % 3 == 0]) for i in range(600)
    ]
    scheduler.offer_all(searches)
    ended = run(engine, clock, 600)
    assert {one.ending for one in ended} == {Ending.COMPLETE}
    for found in ended:
        one = found.search
        number = searches.index(one)
        query = QUERIES[number : number + 1]
        near, nodes = batch.search(one.target, query, one.limit, one.itopk, lanes=1)
        assert found.nodes.tolist() == nodes[0].tolist()
        assert found.near.tobytes() == near[0].tobytes()
    assert not engine.running


def test_an_engine_leaves_the_others_their_share() -> None:
    shape = StepShape(slots=6, expansions=300, each=300)
    engine, scheduler = engine_and_scheduler(Clock(), shape=shape, engines=2)
    scheduler.offer_all([asked(i, 64, list(Stage)[i % 2]) for i in range(5)])
    assert [len(engine.choose(0.0)[0]) for _ in range(4)] == [3, 1, 1, 0]


def test_looking_at_all_of_some_rows_is_exact() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock)
    among = np.arange(0, 3000, 2, dtype=np.int32)
    searches = [asked(i, 16, among=among) for i in range(20)]
    scheduler.offer_all(searches)
    found = {id(one.search): one.nodes.tolist() for one in run(engine, clock, 20)}
    wanted = among[truth(ROWS[among], QUERIES[:20], 10, TARGET.snapshot.space.metric)]
    same = sum(
        len(set(found[id(one)]) & set(row))
        for one, row in zip(searches, wanted.tolist(), strict=True)
    )
    assert same >= 198


def test_a_deadline_in_mid_search_gives_what_was_found_so_far() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock)
    short, long = asked(0, 8), asked(1, 256, deadline_s=0.006)
    scheduler.offer_all([long, short])
    endings = {id(one.search): one for one in run(engine, clock, 2)}
    assert endings[id(short)].ending is Ending.COMPLETE
    cut = endings[id(long)]
    assert cut.ending is Ending.DEADLINE
    assert cut.nodes[0] >= 0
    assert 0 < long.steps_left < steps_of(256)
    scheduler.offer(asked(2, 16, deadline_s=0.0))
    assert run(engine, clock, 1)[0].ending is Ending.DEADLINE
    scheduler.offer_all([asked(i, 16) for i in range(2 * CPU.lanes)])
    run(engine, clock, 2 * CPU.lanes)  # every lane is free again


def test_a_short_search_begins_and_ends_between_two_steps_of_a_long_one() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock, shape=StepShape(slots=1, each=30))
    long, short = asked(0, 256), asked(1, 16, Stage.PREFILL)
    scheduler.offer(long)
    assert not engine.step(*engine.choose(clock()))
    scheduler.offer(short)
    (found,) = engine.step(*engine.choose(clock()))
    assert (found.search, engine.running) == (short, [long])
    assert run(engine, clock, 1)[0].search is long


def test_no_search_takes_more_of_a_step_than_it_may() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock, shape=StepShape(1, expansions=1000, each=3))
    one = asked(0, 64)
    scheduler.offer(one)
    engine.step(*engine.choose(clock()))
    assert one.steps_left == steps_of(64) - 3


def test_those_that_are_late_get_what_the_seeds_tell_a_few_at_a_time() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock, replace(CPU, reserve=4))
    scheduler.offer_all([asked(i, 16, deadline_s=0.0) for i in range(10)])
    ended = run(engine, clock, 10)
    assert {one.ending for one in ended} == {Ending.DEADLINE}
    assert all(one.nodes[0] >= 0 for one in ended)
    assert not engine.running


def test_a_crowd_that_is_late_keeps_nobody_who_runs_from_his_time() -> None:
    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock)
    runs = asked(0, 256)
    scheduler.offer(runs)
    engine.step(*engine.choose(clock()))
    scheduler.offer_all([asked(i, 16, deadline_s=0.0) for i in range(100)])
    chosen, late = engine.choose(clock())
    assert (chosen, len(late)) == ([runs], 32)
    ended = engine.step(chosen, late)
    ended += run(engine, clock, 101 - len(ended))
    assert [one.ending for one in ended].count(Ending.DEADLINE) == 100


def test_lanes_that_cannot_be_made_fail_their_searches_only() -> None:
    room = [False]

    def make(snapshot: Snapshot, lanes: int, itopk: int) -> LaneSet:
        if not room[0]:
            raise IndexFileError("the card is full")
        return CPU.make(snapshot, lanes, itopk)

    clock = Clock()
    engine, scheduler = engine_and_scheduler(clock, replace(CPU, make=make))
    everything = np.arange(3000, dtype=np.int32)
    scheduler.offer_all([asked(0, 16), asked(1, 16, among=everything), asked(2, 16)])
    endings = {id(one.search): one for one in run(engine, clock, 3)}
    assert [one.ending for one in endings.values()].count(Ending.FAILED) == 2
    assert {one.error for one in endings.values()} == {"the card is full", ""}
    room[0] = True
    scheduler.offer(asked(0, 16))
    assert run(engine, clock, 1)[0].ending is Ending.COMPLETE
