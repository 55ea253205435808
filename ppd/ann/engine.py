"""Searches of both stages, for any targets, one step at a time.

Between steps searches come and go; within a step only compiled code runs. Several engines, one
for each core, may share a scheduler. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .lanes import Backend, LaneSet, Target
from .schedule import Scheduler, Ticket
from .space import Rows

MOST_ITOPK = 1024
_KEPT = 8  # lane sets, besides those in use
_KEPT_S = 5.0  # lanes of a target that nobody searches: it may be an index that was replaced
_EXPANSIONS_PER_ITOPK = 1.1  # a search ends when about so many nodes have been expanded
_SCANNED_PER_EXPANSION = 24  # rows; takes about as long
_SMOOTH = 0.05


@dataclass(frozen=True, slots=True)
class StepShape:
    """
    Attributes:
        slots: searches that take part in a step.
        expansions: divided among them, so that a step takes about as long whoever takes part, and
            a newcomer waits no longer than that.
    """

    slots: int = 8
    expansions: int = 768


class Ending(StrEnum):
    COMPLETE = "complete"
    DEADLINE = "deadline"


@dataclass(slots=True, eq=False, kw_only=True)
class Search(Ticket):
    """
    Attributes:
        query: (1, width) in the space's rows.
        itopk: how many nodes it keeps while it looks; at least ``limit``.
        limit: how many it shall find.
        among: (m,) nodes to look at, all of them, instead of following the graph.
        place: its lane; of one without a lane 0 once it has begun.
    """

    target: Target
    query: Rows
    itopk: int
    limit: int
    among: NDArray[np.int32] | None = None
    place: int = field(default=-1, init=False)
    scanned: int = field(default=0, init=False)
    near: NDArray[np.float32] = field(init=False)
    nodes: NDArray[np.int32] = field(init=False)
    filled: int = field(default=0, init=False)


def steps_of(itopk: int, among: NDArray[np.int32] | None = None) -> float:
    """How many expansions a search is likely to take."""
    if among is not None:
        return among.size / _SCANNED_PER_EXPANSION
    return itopk * _EXPANSIONS_PER_ITOPK


@dataclass(frozen=True, slots=True)
class Found:
    """A search that has ended.

    Attributes:
        near: (limit,) squared distances; infinity where there are fewer.
        nodes: (limit,) ids in the graph; -1 where there are fewer.
    """

    search: Search
    near: NDArray[np.float32]
    nodes: NDArray[np.int32]
    ending: Ending


class Pace:
    """A running mean of what one expansion takes, which slack is reckoned with."""

    def __init__(self, expansion_s: float = 5e-6) -> None:
        self.expansion_s = expansion_s

    def observe(self, seconds: float, expansions: int) -> None:
        if expansions:
            self.expansion_s += _SMOOTH * (seconds / expansions - self.expansion_s)


class Engine:
    """
    Args:
        scheduler: gives ``Search`` tickets back, as they were offered. Threads that share it
            call ``choose`` one at a time.
        clock: seconds, for the pace and for deadlines that pass during a step.
        itopk: of the widest search.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pace: Pace,
        clock: Callable[[], float],
        shape: StepShape,
        backend: Backend,
        itopk: int = MOST_ITOPK,
    ) -> None:
        self.running: list[Search] = []
        self._scheduler = scheduler
        self._pace = pace
        self._clock = clock
        self._shape = shape
        self._backend = backend
        self._itopk = itopk
        self._lane_sets: dict[int, LaneSet] = {}
        self._used_s: dict[int, float] = {}

    def choose(self, now_s: float) -> tuple[list[Search], list[Search]]:
        """Who takes part in the next step, and whose deadline has passed before it began."""
        late = self._scheduler.expired(now_s)
        free = self._backend.lanes - 1 - len(self.running)  # one for those that are late
        chosen = self._scheduler.choose(now_s, self._shape.slots, free, self.running)
        return _searches(chosen), _searches(late)

    def step(self, chosen: list[Search], late: list[Search]) -> list[Found]:
        """Advance the chosen. Gives those that are finished, and the late as far as they are."""
        began_s = self._clock()
        ended = []
        for one in late:  # what the seeds tell is better than nothing
            self._begin([one], began_s)
            ended += self._end([one], Ending.DEADLINE)
        self._begin([one for one in chosen if one.place < 0], began_s)
        done = 0
        finished: list[Search] = []
        steps = max(1, self._shape.expansions // max(1, len(chosen)))
        for _, some in _by_target(chosen):
            done += self._advance(some, steps, finished)
        now_s = self._clock()
        self._pace.observe(now_s - began_s, done)
        ended += self._end(finished, Ending.COMPLETE)
        overdue = [one for one in self.running if one.deadline_s <= now_s]
        return ended + self._end(overdue, Ending.DEADLINE)

    def _advance(self, searches: list[Search], steps: int, finished: list[Search]) -> int:
        """All of one target."""
        done = 0
        on_lanes = [one for one in searches if one.among is None]
        if on_lanes:
            lanes = self._lane_sets[_target(on_lanes[0])]
            places = np.array([one.place for one in on_lanes], np.int64)
            done = lanes.extend(places, steps)
            for one, over in zip(on_lanes, lanes.finished(places).tolist(), strict=True):
                one.steps_left = max(1.0, one.steps_left - steps)
                if over:
                    finished.append(one)
        for one in searches:
            if one.among is not None:
                part = one.among[one.scanned : one.scanned + steps * _SCANNED_PER_EXPANSION]
                graph = one.target.snapshot.graph
                query = one.query[0] / np.float32(one.target.snapshot.scale)
                one.filled = kernels.scan(graph, query, part, one.near, one.nodes, one.filled)
                one.scanned += part.size
                one.steps_left = max(1.0, one.steps_left - steps)
                done += steps
                if one.scanned >= one.among.size:
                    finished.append(one)
        return done

    def _begin(self, searches: list[Search], now_s: float) -> None:
        self.running += searches
        for target, some in _by_target(searches):
            on_lanes = []
            for one in some:
                if one.among is None:
                    on_lanes.append(one)
                else:
                    one.place = 0
                    one.near = np.full(one.limit, np.inf, np.float32)
                    one.nodes = np.full(one.limit, -1, np.int32)
            if on_lanes:
                lanes = self._lanes_of(target, on_lanes[0].target, now_s)
                queries = np.concatenate([one.query for one in on_lanes])
                places = lanes.admit(queries, [one.itopk for one in on_lanes])
                for one, place in zip(on_lanes, places, strict=True):
                    one.place = place

    def _lanes_of(self, key: int, target: Target, now_s: float) -> LaneSet:
        """The target's lanes; those of targets that nobody searches any more are given up."""
        searched = {_target(one) for one in self.running}
        for other in sorted(self._used_s, key=self._used_s.__getitem__):  # longest unused first
            stale = self._used_s[other] < now_s - _KEPT_S or len(self._lane_sets) > _KEPT
            if stale and other != key and other not in searched:
                del self._lane_sets[other], self._used_s[other]
        if key not in self._lane_sets:
            self._lane_sets[key] = self._backend.make(target, self._backend.lanes, self._itopk)
        self._used_s[key] = now_s
        return self._lane_sets[key]

    def _end(self, searches: list[Search], ending: Ending) -> list[Found]:
        if not searches:
            return []
        gone = set(map(id, searches))
        self.running = [one for one in self.running if id(one) not in gone]
        found = []
        for target, some in _by_target(searches):
            on_lanes = [one for one in some if one.among is None]
            if on_lanes:
                limits = [one.limit for one in on_lanes]
                places = [one.place for one in on_lanes]
                near, nodes = self._lane_sets[target].release(places, limits)
                found += [
                    Found(one, near[i, : one.limit], nodes[i, : one.limit], ending)
                    for i, one in enumerate(on_lanes)
                ]
            for one in some:
                if one.among is not None:
                    distances = one.near * np.float32(one.target.snapshot.scale**2)
                    found.append(Found(one, distances, one.nodes, ending))
        return found


def _target(search: Search) -> int:
    return id(search.target)


def _by_target(searches: list[Search]) -> Iterable[tuple[int, list[Search]]]:
    grouped: dict[int, list[Search]] = {}
    for one in searches:
        grouped.setdefault(id(one.target), []).append(one)
    return grouped.items()


def _searches(tickets: Sequence[Ticket]) -> list[Search]:
    searches = [one for one in tickets if isinstance(one, Search)]
    assert len(searches) == len(tickets), "a scheduler gives back what it was offered"
    return searches
