"""Bursts of mixed searches, run in three ways: ours, one after the other, in batches.

Open loop: searches arrive at drawn times, whatever is under way. All three ways run the same
compiled steps in as many threads. So they differ only in the order of the work.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ppd.ann import process
from ppd.ann.engine import Engine, Pace, Search, StepShape, steps_of
from ppd.ann.lanes import CpuLaneSet, Target, cpu_backend
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage
from ppd.ann.space import Rows

BATCH = 16
BATCH_WAIT_S = 0.002
_BURST, _QUIET_S, _BURST_S = 5.0, 0.45, 0.05  # rate in bursts, and how long each lasts
_PREFILL_SHARE = 0.3
KINDS = {  # (itopk, limit), drawn alike
    Stage.PREFILL: ((32, 10), (64, 10)),
    Stage.DECODE: ((64, 10), (128, 10), (256, 50)),
}
_PREFILL_BUDGET_S, _DECODE_BUDGET_S = (
    0.005,
    0.05,
)  # for the order alone; no search is cut
_NEVER_CUT_S = 3600.0
_LANES, _ITOPK = 32, 256


class Way(StrEnum):
    """A way to run bursts of searches."""

    OURS = "ours"
    FIFO = "fifo"  # each thread takes the oldest and finishes it
    FIXED = "fixed"  # each thread takes a batch, all answers come when the last is finished


@dataclass(frozen=True, slots=True)
class Arrival:
    """A search that arrives."""

    at_s: float
    stage: Stage
    query: int
    itopk: int
    limit: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A search that was answered."""

    stage: Stage
    took_s: float
    query: int
    itopk: int
    nodes: tuple[int, ...]


def draw(rate: float, seconds: float, queries: int, seed: int) -> list[Arrival]:
    """Draw Poisson arrivals of ``rate`` a second on average, five times as dense in bursts."""
    source = random.Random(seed)
    period_s = _QUIET_S + _BURST_S
    quiet_rate = rate * period_s / (_QUIET_S + _BURST * _BURST_S)
    arrivals: list[Arrival] = []
    now_s = 0.0
    while True:
        in_burst = now_s % period_s >= _QUIET_S
        now_s += source.expovariate(quiet_rate * (_BURST if in_burst else 1.0))
        if now_s >= seconds:
            return arrivals
        stage = Stage.PREFILL if source.random() < _PREFILL_SHARE else Stage.DECODE
        itopk, limit = source.choice(KINDS[stage])
        arrivals.append(Arrival(now_s, stage, source.randrange(queries), itopk, limit))


class _Feed:
    """Arrivals whose time has come; for all threads."""

    def __init__(self, arrivals: Sequence[Arrival], target: Target, moved: Rows) -> None:
        self.lock = threading.Lock()
        self.start_s = time.perf_counter()
        self._arrivals = arrivals
        self._target = target
        self._moved = moved
        self._next = 0
        self.answered: list[Answered] = []
        self.ready: list[tuple[float, int, Search]] = []  # for ways that keep their own order
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

    def wait_for_next(self) -> bool:
        """Sleep until something comes; False: nothing will."""
        if self._next >= len(self._arrivals):
            return False
        at_s = self.start_s + self._arrivals[self._next].at_s
        time.sleep(max(0.0, at_s - time.perf_counter()))
        return True

    def done(self, search: Search, nodes: Sequence[int]) -> None:
        took_s = time.perf_counter() - search.arrived_s
        number = self.numbers.pop(id(search))
        self.answered.append(Answered(search.stage, took_s, number, search.itopk, tuple(nodes)))


def run(
    way: Way, target: Target, moved: Rows, arrivals: Sequence[Arrival], threads: int
) -> list[Answered]:
    """Answer every arrival."""
    pace = Pace()
    controls = Controls(reserved=0.5, flush_s=0.001)
    plenty = Bounds(len(arrivals) + 1, len(arrivals) + 1)
    scheduler = Scheduler(plenty, controls, lambda: pace.expansion_s)
    process.settle()
    feed = _Feed(arrivals, target, moved)
    loops: dict[Way, Callable[[], None]] = {
        Way.OURS: lambda: _ours(feed, scheduler, pace, threads),
        Way.FIFO: lambda: _fifo(feed, target),
        Way.FIXED: lambda: _fixed(feed, target),
    }
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(_pinned, next(cores), loops[way]) for _ in range(threads)]:
            future.result()
    assert len(feed.answered) == len(arrivals), "every search is answered"
    return feed.answered


def _pinned(core: int, loop: Callable[[], None]) -> None:
    """As the pool's own threads are."""
    process.stay_on(core)
    loop()


def _ours(feed: _Feed, scheduler: Scheduler, pace: Pace, engines: int) -> None:
    clock, shape = time.perf_counter, StepShape()
    engine = Engine(scheduler, pace, clock, shape, cpu_backend(), _ITOPK, engines)
    while True:
        with feed.lock:
            now_s = time.perf_counter()
            for search in feed.due(now_s):
                scheduler.offer(search)
            chosen, late = engine.choose(now_s)
        if not chosen:
            if not feed.wait_for_next():
                return
            continue
        for found in engine.step(chosen, late):
            feed.done(found.search, found.nodes.tolist())


def _fifo(feed: _Feed, target: Target) -> None:
    lanes = CpuLaneSet(target.snapshot, 1, _ITOPK)
    while True:
        with feed.lock:
            _enqueue(feed)
            search = heapq.heappop(feed.ready)[2] if feed.ready else None
        if search is None:
            if not feed.wait_for_next():
                return
            continue
        places = np.array(lanes.admit(search.query, [search.itopk]))
        while not lanes.finished(places)[0]:
            lanes.extend(places, _ITOPK)
        _, nodes = lanes.release(places.tolist(), [search.limit], target.hidden)
        feed.done(search, nodes[0].tolist())


def _fixed(feed: _Feed, target: Target) -> None:
    lanes = CpuLaneSet(target.snapshot, BATCH, _ITOPK)
    while True:
        with feed.lock:
            _enqueue(feed)
            waited_s = time.perf_counter() - feed.ready[0][0] if feed.ready else 0.0
            batch = []
            if len(feed.ready) >= BATCH or waited_s >= BATCH_WAIT_S:
                count = min(BATCH, len(feed.ready))
                batch = [heapq.heappop(feed.ready)[2] for _ in range(count)]
            left = bool(feed.ready)
        if not batch:
            if left:
                time.sleep(BATCH_WAIT_S / 20)  # a batch that is not full yet
            elif not feed.wait_for_next():
                return
            continue
        queries = np.concatenate([search.query for search in batch])
        places = np.array(lanes.admit(queries, [search.itopk for search in batch]))
        while not lanes.finished(places).all():
            lanes.extend(places, _ITOPK)
        _, nodes = lanes.release(
            places.tolist(), [arrival.limit for arrival in batch], target.hidden
        )
        for search, row in zip(batch, nodes.tolist(), strict=True):
            feed.done(search, row[: search.limit])


def _enqueue(feed: _Feed) -> None:
    for search in feed.due(time.perf_counter()):
        heapq.heappush(feed.ready, (search.arrived_s, id(search), search))


def p99_us(answered: Sequence[Answered], stage: Stage) -> float:
    """Return the 99th percentile of a stage's latencies, in microseconds."""
    took = [arrival.took_s for arrival in answered if arrival.stage is stage]
    return float(np.percentile(took, 99)) * 1e6


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
