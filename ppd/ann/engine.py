"""Searches of both stages, for any targets, one step at a time.

Between steps searches come and go; within a step only compiled code runs. Several engines, one
for each core, may share a scheduler. Time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ppd.errors import IndexFileError

from . import kernels
from .lanes import Backend, LaneSet, Target
from .schedule import Scheduler, Ticket
from .snapshot import Snapshot
from .space import Rows

MAX_ITOPK = 1024
_KEPT = 8  # lane sets, besides those in use
_KEPT_S = 5.0  # lanes of a snapshot that nobody searches: it may have been replaced
_EXPANSIONS_PER_ITOPK = 1.1  # a search ends when about so many nodes have been expanded
_SCANNED_PER_EXPANSION = 24  # rows; takes about as long
_AGAIN_PER_LIMIT, _AGAIN_MORE = 4, 32  # of them, how many are measured again
_LATE = 32  # that are given up in one step: it shall end in time for those that run
_SMOOTH = 0.05


@dataclass(frozen=True, slots=True)
class StepShape:
    """
    Attributes:
        slots: searches that take part in a step.
        expansions: divided among them, so that a step takes about as long whoever takes part, and
            a newcomer waits no longer than that.
        each: expansions of one search, at most.
    """

    slots: int = 8
    expansions: int = 768
    each: int = 768


class Ending(StrEnum):
    COMPLETE = "complete"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(slots=True, eq=False, kw_only=True)
class Search(Ticket):
    """
    Attributes:
        query: (1, width) in the space's rows.
        itopk: how many nodes it keeps while it looks; at least ``limit``.
        limit: how many it shall find.
        among: (m,) nodes to look at, all of them, instead of following the graph. Those nearest by
            their codes, some more than ``limit``, are then measured again.
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
        error: why it could not begin, if it failed.
    """

    search: Search
    near: NDArray[np.float32]
    nodes: NDArray[np.int32]
    ending: Ending
    error: str = ""


class Pace:
    """A running mean of what one expansion takes, which slack is reckoned with."""

    def __init__(self, expansion_s: float = 5e-6) -> None:
        self.expansion_s = expansion_s

    def observe(self, seconds: float, expansions: float) -> None:
        if expansions:
            self.expansion_s += _SMOOTH * (seconds / expansions - self.expansion_s)


class Engine:
    """
    Args:
        scheduler: gives ``Search`` tickets back, as they were offered. Threads that share it
            call ``choose`` one at a time.
        clock: seconds, for the pace and for deadlines that pass during a step.
        itopk: of the widest search.
        engines: that share the scheduler. Each begins its share of those that wait, so that none
            has eight to run in turn while another has nothing to do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pace: Pace,
        clock: Callable[[], float],
        shape: StepShape,
        backend: Backend,
        itopk: int = MAX_ITOPK,
        engines: int = 1,
    ) -> None:
        self.running: list[Search] = []
        self._scheduler = scheduler
        self._pace = pace
        self._clock = clock
        self._shape = shape
        self._backend = backend
        self._itopk = itopk
        self._engines = engines
        self._lane_sets: dict[int, LaneSet] = {}
        self._used_s: dict[int, float] = {}

    def choose(self, now_s: float) -> tuple[list[Search], list[Search]]:
        """Who takes part in the next step, and whose deadline has passed before it began."""
        most = max(_LATE, self._backend.reserve)
        late = self._scheduler.expired(now_s, most)
        free = self._backend.lanes - self._backend.reserve - len(self.running)
        if len(late) == most:
            free = 0  # who would begin may be late as well
        free = min(free, math.ceil(self._scheduler.all_waiting() / self._engines))
        chosen = self._scheduler.choose(now_s, self._shape.slots, free, self.running)
        return _searches(chosen), _searches(late)

    def step(self, chosen: list[Search], late: list[Search]) -> list[Found]:
        """Advance the chosen. Gives those that are finished, and the late as far as they are."""
        began_s = self._clock()
        ended = []
        for at in range(0, len(late), self._backend.reserve):
            some = late[at : at + self._backend.reserve]
            ended += self._begin(some, began_s)
            begun = [one for one in some if one.place >= 0]
            ended += self._end(begun, Ending.DEADLINE)  # what seeds tell is better than nothing
        ended += self._begin([one for one in chosen if one.place < 0], began_s)
        chosen = [one for one in chosen if one.place >= 0]
        done = 0
        finished: list[Search] = []
        steps = max(1, self._shape.expansions // max(1, len(chosen)))
        steps = min(steps, self._shape.each)
        for _, some in _grouped(chosen, _snapshot):
            done += self._advance(some, steps, finished)
        now_s = self._clock()
        share = len(chosen) if self._backend.parallel else 1
        self._pace.observe(now_s - began_s, done / max(1, share))
        ended += self._end(finished, Ending.COMPLETE)
        overdue = [one for one in self.running if one.deadline_s <= now_s]
        return ended + self._end(overdue, Ending.DEADLINE)

    def _advance(self, searches: list[Search], steps: int, finished: list[Search]) -> int:
        """All of one snapshot."""
        done = 0
        on_lanes = [one for one in searches if one.among is None]
        if on_lanes:
            lanes = self._lane_sets[_snapshot(on_lanes[0])]
            places = np.array([one.place for one in on_lanes], np.int64)
            done = lanes.extend(places, steps)
            for one, over in zip(on_lanes, lanes.finished(places).tolist(), strict=True):
                one.steps_left = max(1.0, one.steps_left - steps)
                if over:
                    finished.append(one)
        for one in searches:
            if one.among is not None:
                part = one.among[one.scanned : one.scanned + steps * _SCANNED_PER_EXPANSION]
                snapshot = one.target.snapshot
                # All are looked at to the end: ``reach`` is a guess.
                graph = snapshot.graph._replace(reach=np.ones_like(snapshot.graph.reach))
                query = one.query[0] / np.float32(snapshot.scale)
                one.filled = kernels.scan(graph, query, part, one.near, one.nodes, one.filled)
                one.scanned += part.size
                one.steps_left = max(1.0, one.steps_left - steps)
                done += steps
                if one.scanned >= one.among.size:
                    finished.append(one)
        return done

    def _begin(self, searches: list[Search], now_s: float) -> list[Found]:
        """Gives those that cannot."""
        failed: list[Found] = []
        for _, some in _grouped(searches, _snapshot):
            on_lanes = []
            for one in some:
                if one.among is None:
                    on_lanes.append(one)
                else:
                    one.place = 0
                    one.near, one.nodes = _nothing(_kept(one))
                    self.running.append(one)
            if on_lanes:
                try:
                    lanes = self._lanes_of(on_lanes[0].target.snapshot, now_s)
                except IndexFileError as error:
                    failed += [
                        Found(one, *_nothing(one.limit), Ending.FAILED, str(error))
                        for one in on_lanes
                    ]
                    continue
                queries = np.concatenate([one.query for one in on_lanes])
                places = lanes.admit(queries, [one.itopk for one in on_lanes])
                for one, place in zip(on_lanes, places, strict=True):
                    one.place = place
                self.running += on_lanes
        return failed

    def _lanes_of(self, snapshot: Snapshot, now_s: float) -> LaneSet:
        """The snapshot's lanes; those of others that nobody searches any more are given up."""
        key = id(snapshot)
        searched = {_snapshot(one) for one in self.running}
        for other in sorted(self._used_s, key=self._used_s.__getitem__):  # longest unused first
            stale = self._used_s[other] < now_s - _KEPT_S or len(self._lane_sets) > _KEPT
            if stale and other != key and other not in searched:
                del self._lane_sets[other], self._used_s[other]
        if key not in self._lane_sets:
            self._lane_sets[key] = self._backend.make(snapshot, self._backend.lanes, self._itopk)
        self._used_s[key] = now_s
        return self._lane_sets[key]

    def _end(self, searches: list[Search], ending: Ending) -> list[Found]:
        if not searches:
            return []
        gone = set(map(id, searches))
        self.running = [one for one in self.running if id(one) not in gone]
        found = []
        for _, some in _grouped(searches, _target):
            on_lanes = [one for one in some if one.among is None]
            if on_lanes:
                limits = [one.limit for one in on_lanes]
                places = [one.place for one in on_lanes]
                lanes = self._lane_sets[_snapshot(on_lanes[0])]
                near, nodes = lanes.release(places, limits, on_lanes[0].target.hidden)
                found += [
                    Found(one, near[i, : one.limit], nodes[i, : one.limit], ending)
                    for i, one in enumerate(on_lanes)
                ]
            for one in some:
                if one.among is not None:
                    found.append(Found(one, *_measured_again(one), ending))
        return found


def _target(search: Search) -> int:
    return id(search.target)


def _snapshot(search: Search) -> int:
    return id(search.target.snapshot)


def _grouped(
    searches: list[Search], by: Callable[[Search], int]
) -> Iterable[tuple[int, list[Search]]]:
    groups: dict[int, list[Search]] = {}
    for one in searches:
        groups.setdefault(by(one), []).append(one)
    return groups.items()


def _kept(search: Search) -> int:
    """Of rows that are looked at one by one."""
    if not search.target.snapshot.exact.shape[0]:
        return search.limit
    return _AGAIN_PER_LIMIT * search.limit + _AGAIN_MORE


def _measured_again(search: Search) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    snapshot = search.target.snapshot
    if not snapshot.exact.shape[0]:
        return search.near * np.float32(snapshot.scale**2), search.nodes
    near, nodes = _nothing(search.limit)
    found = search.nodes[: search.filled]
    distances = ((snapshot.exact[found] - search.query) ** 2).sum(1)
    best = np.lexsort((found, distances))[: search.limit]
    near[: best.size], nodes[: best.size] = distances[best], found[best]
    return near, nodes


def _nothing(limit: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    return np.full(limit, np.inf, np.float32), np.full(limit, -1, np.int32)


def _searches(tickets: Sequence[Ticket]) -> list[Search]:
    searches = [one for one in tickets if isinstance(one, Search)]
    assert len(searches) == len(tickets), "a scheduler gives back what it was offered"
    return searches
