"""Bursts of mixed searches, measured in every way to order them.

Open loop: searches arrive at drawn times, whatever is under way. All ways run the same compiled
code over the same index in as many threads. So they differ only in the order of the work, and in
the time that the order takes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ppd.ann import process
from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.lanes import CpuLaneSet, LaneSet, Target, cpu_backend
from ppd.ann.schedule import Bounds, Controls, Scheduler
from ppd.ann.searches import Search, steps_of
from ppd.ann.snapshot import Snapshot
from ppd.ann.space import Rows

from . import to_the_end
from .arrivals import Arrival, draw
from .orders import BATCH, Queue, Way, queue_of
from .stopwatch import Stopwatch, TimedLanes
from .waits import BeforeTurn, Ended, Waits, unchanged

_NEVER_CUT_S = 3600.0
_USUAL = Controls()


@dataclass(frozen=True, slots=True)
class Answered:
    """What a search found."""

    query: int
    itopk: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """A history that was served.

    Attributes:
        answered: what the searches found, in the order of their ends.
        ended: when they ended, in the same order.
        scheduling_us: processor time of each search outside the compiled code.
        choosing_us: the part of it in which the order is kept.
    """

    answered: Sequence[Answered]
    ended: Sequence[Ended]
    scheduling_us: float
    choosing_us: float

    def waits(self) -> Waits:
        """Return the latencies."""
        waits = Waits()
        for one in self.ended:
            waits.add(one.stage, one.at_s - one.arrived_s)
        return waits


class _Feed:
    """Arrivals whose time has come; for all threads.

    Attributes:
        widest: largest itopk of all.
    """

    def __init__(self, arrivals: Sequence[Arrival], target: Target, moved: Rows) -> None:
        self.lock = threading.Lock()
        self.ending = threading.Lock()
        self.start_s = time.perf_counter()
        self.widest = max(arrival.itopk for arrival in arrivals)
        self._arrivals = arrivals
        self._target = target
        self._moved = moved
        self._next = 0
        self.answered: list[Answered] = []
        self.ended: list[Ended] = []
        self.numbers: dict[int, int] = {}

    def due(self, now_s: float) -> list[Search]:
        """Under the lock."""
        came = []
        while self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            at_s = self.start_s + arrival.at_s
            if at_s > now_s:
                break
            search = Search(
                arrival.stage,
                at_s,
                at_s + _NEVER_CUT_S,
                steps_of(arrival.itopk),
                target=self._target,
                query=self._moved[arrival.query : arrival.query + 1],
                itopk=arrival.itopk,
                limit=arrival.limit,
            )
            self.numbers[id(search)] = arrival.query
            came.append(search)
            self._next += 1
        return came

    def wait(self, due_s: float | None) -> bool:
        """Sleep until ``due_s`` or the next arrival; False: nothing is to come."""
        wakes_s = [] if due_s is None else [due_s]
        if self._next < len(self._arrivals):
            wakes_s.append(self.start_s + self._arrivals[self._next].at_s)
        if not wakes_s:
            return False
        time.sleep(max(0.0, min(wakes_s) - time.perf_counter()))
        return True

    def done(self, search: Search, nodes: Sequence[int]) -> None:
        now_s = time.perf_counter()
        number = self.numbers.pop(id(search))
        ended = Ended(search.stage, search.arrived_s - self.start_s, now_s - self.start_s)
        with self.ending:
            self.answered.append(Answered(number, search.itopk, tuple(nodes)))
            self.ended.append(ended)


def run(
    way: Way,
    target: Target,
    moved: Rows,
    arrivals: Sequence[Arrival],
    threads: int,
    controls: Controls = _USUAL,
    before_turn: BeforeTurn = unchanged,
) -> Served:
    """Answer every arrival.

    Args:
        way: to order the searches.
        target: what is searched.
        moved: queries in the space's rows.
        arrivals: of the history.
        threads: that search.
        controls: of ours.
        before_turn: of ours, called before each choice.
    """
    process.settle()
    feed = _Feed(arrivals, target, moved)
    if way is Way.OURS:
        loop = _ours(feed, len(arrivals), threads, controls, before_turn)
    else:
        loop = _whole(feed, target, way)
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_pinned, next(cores), loop) for _ in range(threads)]
        watches = [future.result() for future in futures]
    assert len(feed.answered) == len(arrivals), "every search is answered"
    scheduling_s = sum(watch.other_s() for watch in watches)
    choosing_s = sum(watch.choosing_s for watch in watches)
    count = len(arrivals)
    return Served(feed.answered, feed.ended, scheduling_s * 1e6 / count, choosing_s * 1e6 / count)


def _pinned(core: int, loop: Callable[[Stopwatch], None]) -> Stopwatch:
    """As the pool's own threads are."""
    process.stay_on(core)
    watch = Stopwatch()
    loop(watch)
    watch.stop()
    return watch


def _ours(
    feed: _Feed, searches: int, engines: int, controls: Controls, before_turn: BeforeTurn
) -> Callable[[Stopwatch], None]:
    pace = Pace()
    plenty = Bounds(searches + 1, searches + 1)
    scheduler: Scheduler[Search] = Scheduler(plenty, controls, lambda: pace.expansion_s)

    def loop(watch: Stopwatch) -> None:
        def make(snapshot: Snapshot, lanes: int, itopk: int) -> LaneSet:
            return TimedLanes(CpuLaneSet(snapshot, lanes, itopk), watch)

        backend = replace(cpu_backend(), make=make)
        clock = time.perf_counter
        engine = Engine(scheduler, pace, clock, StepShape(), backend, feed.widest, engines)
        while True:
            with feed.lock:
                now_s = time.perf_counter()
                came = feed.due(now_s)
                with watch.choosing():
                    for search in came:
                        scheduler.offer(search)
                    before_turn(now_s - feed.start_s, scheduler, feed.ended)
                    chosen, late = engine.choose(now_s)
            if not chosen:
                if not feed.wait(None):
                    return
                continue
            for found in engine.step(chosen, late):
                feed.done(found.search, found.nodes.tolist())

    return loop


def _whole(feed: _Feed, target: Target, way: Way) -> Callable[[Stopwatch], None]:
    queue: Queue[Search] = queue_of(way)

    def loop(watch: Stopwatch) -> None:
        alone = CpuLaneSet(target.snapshot, 1, feed.widest)
        lanes = TimedLanes(CpuLaneSet(target.snapshot, BATCH, feed.widest), watch)
        while True:
            with feed.lock:
                now_s = time.perf_counter()
                came = feed.due(now_s)
                with watch.choosing():
                    for search in came:
                        queue.offer(search.stage, search.arrived_s, search)
                    batch = queue.take(now_s)
                    due_s = queue.due_s()
            if not batch:
                if not feed.wait(due_s):
                    return
            elif len(batch) == 1:
                feed.done(batch[0], _alone(alone, batch[0], target, watch))
            else:
                for search, row in zip(
                    batch, _together(lanes, batch, target, feed.widest), strict=True
                ):
                    feed.done(search, row[: search.limit])

    return loop


def _alone(lanes: CpuLaneSet, search: Search, target: Target, watch: Stopwatch) -> list[int]:
    """Search in one compiled call."""
    near = np.empty((1, search.limit), np.float32)
    nodes = np.empty((1, search.limit), np.int32)
    with watch.compiled():
        lanes.search_all(search.query, search.itopk, target.hidden, near, nodes)
    found: list[int] = nodes[0].tolist()
    return found


def _together(
    lanes: TimedLanes, batch: Sequence[Search], target: Target, widest: int
) -> list[list[int]]:
    """Search until the last of the batch is finished."""
    queries = np.concatenate([search.query for search in batch])
    widths = [search.itopk for search in batch]
    limits = [search.limit for search in batch]
    nodes = to_the_end.run(lanes, queries, widths, 2 * widest, limits, target.hidden)[1]
    found: list[list[int]] = nodes.tolist()
    return found


def capacity(target: Target, moved: Rows, threads: int, seed: int) -> float:
    """Measure how many searches of the mix ``threads`` threads finish a second."""
    arrivals = [
        Arrival(0.0, arrival.stage, arrival.query, arrival.itopk, arrival.limit)
        for arrival in draw(2000.0, 1.0, moved.shape[0], seed)
    ]
    process.settle()  # not a part of it
    began_s = time.perf_counter()
    run(Way.FIFO, target, moved, arrivals, threads)
    return len(arrivals) / (time.perf_counter() - began_s)
