"""Bursts in every way to order them, in simulated time.

The real engines, scheduler and queues run over lanes that compute nothing. The time that an
expansion, a step or a search takes is given. So no noise of the machine is in it, and it can be
asked what would be left if Python took no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.lanes import Advanced, LaneSet, Target, Whole, cpu_backend
from ppd.ann.schedule import Bounds, Controls, Scheduler
from ppd.ann.searches import Search, steps_of
from ppd.ann.snapshot import Snapshot
from ppd.ann.space import Rows

from .arrivals import Arrival
from .orders import Queue, Way, queue_of
from .waits import BeforeTurn, Ended, Waits, unchanged

CORES = 2
_PYTHON = ("step", "search", "whole", "batch", "batched", "alone")  # of the costs
_NEVER_S = 1e9
_TARGET = Target(cast(Snapshot, object()), np.zeros(0, np.uint8))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a core; about those of 50,000 rows of 384 dimensions in int8.

    Attributes:
        kept: for each kept node, when a lane is read and its rows are measured again.
        together: share of an expansion's time that it takes beside other searches of the call.
        step: Python's, of a step of ours.
        search: Python's, of ours for each search that is divided.
        whole: Python's, of ours for each search that is not divided.
        batch: Python's, of a batch.
        batched: Python's, for each search of a batch.
        alone: Python's, of a search that one compiled call runs to its end.
    """

    expansion: float = 1.6e-6
    enter: float = 20e-6
    kept: float = 0.33e-6
    together: float = 0.95
    step: float = 26e-6
    search: float = 34e-6
    whole: float = 25e-6
    batch: float = 36e-6
    batched: float = 25e-6
    alone: float = 40e-6

    def compiled(self, itopk: int, searches: int = 1) -> float:
        """Return the seconds that a search of this width takes in a call of so many searches."""
        expansion = self.expansion * (self.together if searches > 1 else 1.0)
        return self.enter + itopk * (expansion + self.kept)

    def with_python(self, share: float) -> Costs:
        """Return these costs, with a share of Python's."""
        python = {name: share * getattr(self, name) for name in _PYTHON}
        return replace(self, **python)


@dataclass(slots=True)
class Served:
    """A history that was served.

    Attributes:
        python_s: Python's time in all.
        ended: of ours, the searches in the order of their ends.
    """

    waits: Waits = field(default_factory=Waits)
    python_s: float = 0.0
    ended: list[Ended] = field(default_factory=list)

    def scheduling_us(self) -> float:
        """Return Python's time for each search, in microseconds."""
        return self.python_s * 1e6 / self.waits.count()


@dataclass(slots=True)
class _Core:
    """Lanes that take time and find nothing."""

    costs: Costs
    now_s: float = 0.0
    python_s: float = 0.0
    left: NDArray[np.int64] = field(default_factory=lambda: np.zeros(cpu_backend().lanes, np.int64))
    kept: NDArray[np.int64] = field(default_factory=lambda: np.zeros(cpu_backend().lanes, np.int64))
    free: list[int] = field(default_factory=lambda: list(range(cpu_backend().lanes)))

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        places = [self.free.pop() for _ in widths]
        self.left[places] = self.kept[places] = widths
        self.run_python(len(places) * self.costs.search)
        self.now_s += len(places) * self.costs.enter
        return places

    def run_python(self, seconds: float) -> None:
        self.python_s += seconds
        self.now_s += seconds

    def whole(self, query: Rows, width: int, limit: int, hidden: NDArray[np.uint8]) -> Whole:
        self.run_python(self.costs.whole)
        self.now_s += self.costs.compiled(width)
        return Whole(width, np.zeros(limit, np.float32), np.zeros(limit, np.int32))

    def advance(
        self,
        places: Sequence[int],
        steps: int,
        limits: Sequence[int],
        hidden: Sequence[NDArray[np.uint8]],
    ) -> Advanced:
        at = list(places)
        before = self.left[at]
        self.left[at] = np.maximum(before - steps, 0)
        done = int((before - self.left[at]).sum())
        self.now_s += done * self.costs.expansion * (self.costs.together if len(at) > 1 else 1.0)
        finished = self.left[at] == 0
        self.release([place for place in at if not self.left[place]], limits, hidden)
        shape = len(at), max(limits)
        return Advanced(done, finished, np.zeros(shape, np.float32), np.zeros(shape, np.int32))

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        self.now_s += float(self.kept[list(places)].sum()) * self.costs.kept
        self.free.extend(places)
        shape = len(places), max(limits)
        return np.zeros(shape, np.float32), np.zeros(shape, np.int32)


@dataclass(frozen=True, slots=True)
class Ours:
    """A variant of ours."""

    controls: Controls = field(default_factory=Controls)
    shape: StepShape = field(default_factory=StepShape)


def serve(way: Way, arrivals: Sequence[Arrival], costs: Costs, variant: Ours = Ours()) -> Served:
    """Serve all arrivals.

    Args:
        variant: of ours; other ways have none.
    """
    if way is Way.OURS:
        return serve_ours(arrivals, costs, variant)
    return _whole(queue_of(way), arrivals, costs)


def mean_alone(arrivals: Sequence[Arrival], costs: Costs) -> float:
    """Return the mean seconds of a core that a search takes alone."""
    return float(np.mean([_alone(arrival, costs) for arrival in arrivals]))


def serve_ours(
    arrivals: Sequence[Arrival],
    costs: Costs,
    variant: Ours,
    before_turn: BeforeTurn = unchanged,
) -> Served:
    """Serve all arrivals with the engines and the scheduler.

    Args:
        arrivals: of the history.
        costs: of a core.
        variant: of ours.
        before_turn: called before each choice.
    """
    pace = Pace(costs.expansion)
    plenty = Bounds(len(arrivals), len(arrivals))
    scheduler: Scheduler[Search] = Scheduler(plenty, variant.controls, lambda: pace.expansion_s)
    cores = [_Core(costs) for _ in range(CORES)]
    engines = [_engine(core, scheduler, pace, variant.shape) for core in cores]
    served = Served()
    turns = [(0.0, number) for number in range(CORES)]
    came = 0
    while turns:
        now_s, number = heapq.heappop(turns)
        core, engine = cores[number], engines[number]
        while came < len(arrivals) and arrivals[came].at_s <= now_s:
            scheduler.offer(_search(arrivals[came]))
            came += 1
        before_turn(now_s, scheduler, served.ended)
        chosen, late = engine.choose(now_s)
        if not chosen:
            if came < len(arrivals):
                heapq.heappush(turns, (arrivals[came].at_s, number))
            continue
        core.now_s = now_s
        core.run_python(costs.step)
        for found in engine.step(chosen, late):
            search = found.search
            served.waits.add(search.stage, core.now_s - search.arrived_s)
            served.ended.append(Ended(search.stage, search.arrived_s, core.now_s))
        heapq.heappush(turns, (core.now_s, number))
    served.python_s = sum(core.python_s for core in cores)
    return served


def _whole(queue: Queue[Arrival], arrivals: Sequence[Arrival], costs: Costs) -> Served:
    """Serve whole searches; the answers of a batch come when the last one is finished."""
    served = Served()
    turns = [(0.0, number) for number in range(CORES)]
    came = 0
    while turns:
        now_s, number = heapq.heappop(turns)
        while came < len(arrivals) and arrivals[came].at_s <= now_s:
            queue.offer(arrivals[came].stage, arrivals[came].at_s, arrivals[came])
            came += 1
        batch = queue.take(now_s)
        if not batch:
            wakes_s = [one.at_s for one in arrivals[came : came + 1]]
            if (due_s := queue.due_s()) is not None:
                wakes_s.append(due_s)
            if wakes_s:
                heapq.heappush(turns, (min(wakes_s), number))
            continue
        count = len(batch)
        python_s = costs.alone if count == 1 else costs.batch + count * costs.batched
        ends_s = now_s + python_s + sum(costs.compiled(one.itopk, count) for one in batch)
        served.python_s += python_s
        for one in batch:
            served.waits.add(one.stage, ends_s - one.at_s)
        heapq.heappush(turns, (ends_s, number))
    return served


def _alone(arrival: Arrival, costs: Costs) -> float:
    return costs.alone + costs.compiled(arrival.itopk)


def _engine(core: _Core, scheduler: Scheduler[Search], pace: Pace, shape: StepShape) -> Engine:
    def make(snapshot: Snapshot, lanes: int, itopk: int) -> LaneSet:
        return core

    backend = replace(cpu_backend(), make=make)
    return Engine(scheduler, pace, lambda: core.now_s, shape, backend, engines=CORES)


def _search(arrival: Arrival) -> Search:
    return Search(
        arrival.stage,
        arrival.at_s,
        arrival.at_s + _NEVER_S,
        steps_of(arrival.itopk),
        target=_TARGET,
        query=np.zeros((1, 1), np.float32),
        itopk=arrival.itopk,
        limit=arrival.limit,
    )
