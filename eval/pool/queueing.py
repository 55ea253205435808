"""``ppd-eval pool queueing``: bursts in the same three ways, in simulated time.

The real engines and the real scheduler run over lanes that compute nothing. The time that an
expansion, a step or a search takes is given. So no noise of the machine is in it, and it can be
asked what would be left if Python took no time.
"""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ppd.ann.engine import Engine, Pace, Search, StepShape, steps_of
from ppd.ann.lanes import LaneSet, Target, cpu_backend
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage
from ppd.ann.snapshot import Snapshot
from ppd.ann.space import Rows

from ..provenance import provenance
from ..raw_rows import appending
from .bursts import BATCH, BATCH_WAIT_S, Arrival, draw

_CORES = 2
_NEVER_S = 1e9
_TARGET = Target(cast(Snapshot, object()), np.zeros(0, np.uint8))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a core; about those of 50,000 rows of 384 dimensions in int8.

    Attributes:
        kept: for each kept node, when a lane is read and its rows are measured again.
        step, search: Python's, of a step or a batch and for each search that begins in it.
        alone: Python's, of a search that is run to its end by itself.
    """

    expansion: float = 1.6e-6
    enter: float = 5e-6
    kept: float = 0.33e-6
    step: float = 60e-6
    search: float = 37e-6
    alone: float = 70e-6

    def compiled(self, itopk: int) -> float:
        """Return the seconds that a compiled search of this width takes."""
        return self.enter + itopk * (self.expansion + self.kept)


@dataclass(slots=True)
class _Core:
    """Lanes that take time and find nothing."""

    costs: Costs
    now_s: float = 0.0
    left: NDArray[np.int64] = field(default_factory=lambda: np.zeros(cpu_backend().lanes, np.int64))
    kept: NDArray[np.int64] = field(default_factory=lambda: np.zeros(cpu_backend().lanes, np.int64))
    free: list[int] = field(default_factory=lambda: list(range(cpu_backend().lanes)))

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        places = [self.free.pop() for _ in widths]
        self.left[places] = self.kept[places] = widths
        self.now_s += len(places) * (self.costs.search + self.costs.enter)
        return places

    def extend(self, places: NDArray[np.int64], steps: int) -> int:
        before = self.left[places]
        self.left[places] = np.maximum(before - steps, 0)
        done = int((before - self.left[places]).sum())
        self.now_s += done * self.costs.expansion
        return done

    def finished(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray(self.left[places] == 0)

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        self.now_s += float(self.kept[list(places)].sum()) * self.costs.kept
        self.free.extend(places)
        shape = len(places), max(limits)
        return np.zeros(shape, np.float32), np.zeros(shape, np.int32)


Waits = dict[Stage, list[float]]  # seconds from arrival to answer


def ours(arrivals: Sequence[Arrival], costs: Costs) -> Waits:
    """Simulate our engines and scheduler."""
    pace = Pace(costs.expansion)
    plenty = Bounds(len(arrivals), len(arrivals))
    controls = Controls(reserved=0.5, flush_s=0.001)  # as in the bench
    scheduler = Scheduler(plenty, controls, lambda: pace.expansion_s)
    cores = [_Core(costs) for _ in range(_CORES)]
    engines = [_engine(core, scheduler, pace) for core in cores]
    waits: Waits = {stage: [] for stage in Stage}
    turns = [(0.0, number) for number in range(_CORES)]
    came = 0
    while turns:
        now_s, number = heapq.heappop(turns)
        core, engine = cores[number], engines[number]
        while came < len(arrivals) and arrivals[came].at_s <= now_s:
            scheduler.offer(_search(arrivals[came]))
            came += 1
        chosen, late = engine.choose(now_s)
        if not chosen:
            if came < len(arrivals):
                heapq.heappush(turns, (arrivals[came].at_s, number))
            continue
        core.now_s = now_s + costs.step
        for found in engine.step(chosen, late):
            waits[found.search.stage].append(core.now_s - found.search.arrived_s)
        heapq.heappush(turns, (core.now_s, number))
    return waits


def fifo(arrivals: Sequence[Arrival], costs: Costs) -> Waits:
    """Simulate cores that take the oldest search and finish it."""
    waits: Waits = {stage: [] for stage in Stage}
    free_s = [0.0] * _CORES
    for arrival in arrivals:
        ends_s = max(heapq.heappop(free_s), arrival.at_s) + _alone(arrival, costs)
        heapq.heappush(free_s, ends_s)
        waits[arrival.stage].append(ends_s - arrival.at_s)
    return waits


def fixed(arrivals: Sequence[Arrival], costs: Costs) -> Waits:
    """Simulate cores that take a batch; all its answers come when the last is finished."""
    waits: Waits = {stage: [] for stage in Stage}
    free_s = [0.0] * _CORES
    at = 0
    while at < len(arrivals):
        last = at + BATCH - 1
        is_full_s = arrivals[last].at_s if last < len(arrivals) else _NEVER_S
        begins_s = max(heapq.heappop(free_s), min(is_full_s, arrivals[at].at_s + BATCH_WAIT_S))
        batch = [arrival for arrival in arrivals[at : at + BATCH] if arrival.at_s <= begins_s]
        works_s = sum(costs.search + costs.compiled(one.itopk) for one in batch)
        ends_s = begins_s + costs.step + works_s
        for one in batch:
            waits[one.stage].append(ends_s - one.at_s)
        heapq.heappush(free_s, ends_s)
        at += len(batch)
    return waits


def run(loads: Sequence[float], seeds: int, out: Path | None, seconds: float = 20.0) -> int:
    """Simulate all ways at all loads; the last line on stdout is one JSON object of p99s."""
    costs = Costs()
    mix = draw(2000.0, seconds, 1, seeds)
    capacity = _CORES / statistics.mean(_alone(arrival, costs) for arrival in mix)
    half = replace(costs, step=costs.step / 2, search=costs.search / 2, alone=costs.alone / 2)
    free = replace(costs, step=0.0, search=0.0, alone=0.0)
    ways: dict[str, tuple[Callable[[Sequence[Arrival], Costs], Waits], Costs]] = {
        "ours": (ours, costs),
        "ours_half_python": (ours, half),
        "ours_without_python": (ours, free),
        "fifo": (fifo, costs),
        "fifo_without_python": (fifo, free),
        "fixed": (fixed, costs),
        "fixed_without_python": (fixed, free),
    }
    summary: dict[str, dict[str, float]] = {}
    with appending(out) as write:
        for load in loads:
            p99_us: dict[str, list[float]] = {}
            for seed in range(seeds):
                given = draw(capacity * load, seconds, 1, seed)
                for way, (answer, way_costs) in ways.items():
                    waits = answer(given, way_costs)
                    row: dict[str, Any] = {"load": load, "way": way, "capacity": capacity}
                    for stage in Stage:
                        value = float(np.percentile(waits[stage], 99)) * 1e6
                        row[f"{stage}_p99_us"] = value
                        p99_us.setdefault(f"{way}_{stage}_p99_us", []).append(value)
                    write({**row, **asdict(way_costs), **provenance(seed)})
            summary[f"load{load}"] = {
                name: round(statistics.median(values), 1) for name, values in p99_us.items()
            }
    print(json.dumps(summary))
    return 0


def _alone(arrival: Arrival, costs: Costs) -> float:
    return costs.alone + costs.compiled(arrival.itopk)


def _engine(core: _Core, scheduler: Scheduler, pace: Pace) -> Engine:
    def make(snapshot: Snapshot, lanes: int, itopk: int) -> LaneSet:
        return core

    backend = replace(cpu_backend(), make=make)
    return Engine(scheduler, pace, lambda: core.now_s, StepShape(), backend, engines=_CORES)


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
