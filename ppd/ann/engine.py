"""The search engine: advances searches of both stages and of any targets, one step at a time.

Searches begin and end between steps; within a step only compiled code runs. Several engines, one
per core, may share a scheduler. Time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ppd.errors import IndexFileError

from . import scans
from .lanes import Backend, CoreLaneSet, LaneSet
from .schedule import Room, Scheduler
from .searches import MAX_ITOPK, SCANNED_PER_EXPANSION, Ending, Found, Search, empty_result
from .snapshot import Snapshot

_KEPT = 8  # lane sets that are kept besides those in use
_KEPT_S = 5.0  # how long the lanes of an unused snapshot are kept: it may have been replaced
_MAX_LATE = 32  # expired searches in one step, so that it ends in time for the running ones
_SMOOTH = 0.05
# An enum's attribute is slow to look up (Python 3.11).
_COMPLETE, _DEADLINE = Ending.COMPLETE, Ending.DEADLINE


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step.

    A core serves its searches one after the other. Its step is one search that runs to its end, or
    a part of a search with more than ``each`` expansions. So ``each`` bounds the wait of a new
    search. With more slots a step has as many searches of one stage as fit into ``expansions``. On
    a GPU searches advance side by side, and ``expansions`` is divided among all of them.

    Attributes:
        slots: searches that take part in a step.
        expansions: expansions of a step.
        each: maximum expansions of one search in a step.
    """

    slots: int = 1
    expansions: int = 320
    each: int = 320


class Pace:
    """A running mean of the duration of one expansion, from which slack is computed.

    Attributes:
        expansion_s: the mean.
    """

    def __init__(self, expansion_s: float = 5e-6) -> None:
        self.expansion_s = expansion_s

    def observe(self, seconds: float, expansions: float) -> None:
        """Update the mean by a step."""
        if expansions:
            self.expansion_s += _SMOOTH * (seconds / expansions - self.expansion_s)


class Engine:
    """Advances the searches that a scheduler chooses.

    Args:
        scheduler: the queue of searches. Threads that share it call ``choose`` one at a time.
        pace: the duration of an expansion, updated by each step.
        clock: seconds, for the pace and for deadlines that pass during a step.
        shape: the size of a step.
        backend: the device and its lanes.
        itopk: the largest itopk of a search.
        engines: number of engines that share the scheduler. Each one begins only its share of the
            searches that wait, so that no engine is idle while another has a full step.

    Attributes:
        running: the searches that have begun and are not finished.
    """

    def __init__(
        self,
        scheduler: Scheduler[Search],
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
        work, each = float(shape.expansions), float(shape.each)
        self._room = Room(shape.slots, work, each, mixed=False)
        if backend.parallel:
            self._room = Room(shape.slots, shape.slots, 1.0, mixed=True)
        self._backend = backend
        self._itopk = itopk
        self._engines = engines
        self._lane_sets: dict[int, LaneSet] = {}
        self._used_s: dict[int, float] = {}

    def choose(self, now_s: float) -> tuple[list[Search], list[Search]]:
        """Choose the searches of the next step.

        Returns:
            The searches that take part in the step, and those that expired before they began.
        """
        max_late = max(_MAX_LATE, self._backend.reserve)
        late = self._scheduler.expired(now_s, max_late)
        waiting = self._scheduler.all_waiting()
        if not waiting and not self.running:
            return [], late
        free = self._backend.lanes - self._backend.reserve - len(self.running)
        if len(late) == max_late:
            free = 0  # the next searches may have expired as well
        free = min(free, math.ceil(waiting / self._engines))
        return self._scheduler.choose(self._room, free, self.running), late

    def step(self, chosen: list[Search], late: list[Search]) -> list[Found]:
        """Run one step.

        Args:
            chosen: the searches to advance.
            late: expired searches, which end with the nodes that they find among the seeds.

        Returns:
            The results of all searches that ended in the step.
        """
        began_s = self._clock()
        ended: list[Found] = []
        for at in range(0, len(late), self._backend.reserve):
            group = late[at : at + self._backend.reserve]
            ended += self._begin(group, began_s)
            # Seeds are better than no result.
            ended += self._cut([search for search in group if search.place >= 0])
        done = 0.0
        divided: list[Search] = []
        for search in chosen:
            if self._is_whole(search):
                of_search, found = self._run_whole(search, began_s)
                done += of_search
                ended.append(found)
            else:
                divided.append(search)
        if divided:
            of_all, complete = self._advance_all(divided, began_s)
            done += of_all
            ended += complete
        now_s = self._clock()
        self._pace.observe(now_s - began_s, done)
        if self.running:
            still = [search for search in self.running if search.place >= 0]
            ended += self._cut([search for search in still if search.deadline_s <= now_s])
        return ended

    def _is_whole(self, search: Search) -> bool:
        """Whether a search begins and ends in one step of a core."""
        if self._backend.parallel or search.place >= 0 or search.among is not None:
            return False
        return search.steps_left <= self._shape.each

    def _run_whole(self, search: Search, now_s: float) -> tuple[int, Found]:
        """Run a search to its end; returns its expansions and its result."""
        target = search.target
        try:
            lanes = cast(CoreLaneSet, self._lanes_of(target.snapshot, now_s))
        except IndexFileError as error:
            return 0, _failed(search, error)
        ran = lanes.whole(search.query, search.itopk, search.limit, target.hidden)
        return ran.expansions, Found(search, ran.near, ran.nodes, _COMPLETE)

    def _advance_all(self, searches: list[Search], now_s: float) -> tuple[float, list[Found]]:
        """Advance searches by a step; those that have not begun begin.

        Returns:
            The expansions that were done one after the other, and the results of the searches that
            ended.
        """
        ended: list[Found] = []
        if new := [search for search in searches if search.place < 0]:
            ended += self._begin(new, now_s)
            searches = [search for search in searches if search.place >= 0]
        steps = self._shape.each
        if self._backend.parallel:
            steps = min(steps, max(1, self._shape.expansions // max(1, len(searches))))
        done = 0
        for group in _by_snapshot(searches):
            of_group, complete = self._advance(group, steps)
            done += of_group
            ended += complete
        return done / max(1, len(searches)) if self._backend.parallel else done, ended

    def _advance(self, searches: list[Search], steps: int) -> tuple[int, list[Found]]:
        """Advance searches of one snapshot.

        Returns:
            The number of expansions that were done, and the results of the searches that ended.
        """
        done = 0
        ended = []
        if on_lanes := [search for search in searches if search.among is None]:
            lanes = self._lane_sets[id(on_lanes[0].target.snapshot)]
            advanced = lanes.advance(
                [search.place for search in on_lanes],
                steps,
                [search.limit for search in on_lanes],
                [search.target.hidden for search in on_lanes],
            )
            done, finished = advanced.expansions, advanced.finished.tolist()
            for i, search in enumerate(on_lanes):
                if finished[i]:
                    near = advanced.near[i, : search.limit]
                    nodes = advanced.nodes[i, : search.limit]
                    ended.append(_ended(search, near, nodes, _COMPLETE))
        for search in searches:
            search.steps_left = max(1.0, search.steps_left - steps)
            if search.among is not None:
                scans.advance(search, search.among, steps * SCANNED_PER_EXPANSION)
                done += steps
                if search.scanned >= search.among.size:
                    ended.append(_ended(search, *scans.result(search), _COMPLETE))
        return done, ended

    def _begin(self, searches: list[Search], now_s: float) -> list[Found]:
        """Begin searches; returns those that cannot begin."""
        failed: list[Found] = []
        for group in _by_snapshot(searches):
            on_lanes = [search for search in group if search.among is None]
            for search in group:
                if search.among is not None:
                    scans.begin(search)
                    self.running.append(search)
            if not on_lanes:
                continue
            try:
                lanes = self._lanes_of(on_lanes[0].target.snapshot, now_s)
            except IndexFileError as error:
                failed += [_failed(search, error) for search in on_lanes]
                continue
            queries = on_lanes[0].query
            if len(on_lanes) > 1:
                queries = np.concatenate([search.query for search in on_lanes])
            places = lanes.admit(queries, [search.itopk for search in on_lanes])
            for search, place in zip(on_lanes, places, strict=True):
                search.place = place
            self.running += on_lanes
        return failed

    def _lanes_of(self, snapshot: Snapshot, now_s: float) -> LaneSet:
        """The lanes of a snapshot; lanes of unused snapshots are freed."""
        key = id(snapshot)
        if len(self._lane_sets) > (key in self._lane_sets):
            self._free_unused(key, now_s)
        if key not in self._lane_sets:
            self._lane_sets[key] = self._backend.make(snapshot, self._backend.lanes, self._itopk)
        self._used_s[key] = now_s
        return self._lane_sets[key]

    def _free_unused(self, key: int, now_s: float) -> None:
        """Free the lanes of snapshots that were not searched for long, except those of ``key``."""
        searched = {id(search.target.snapshot) for search in self.running}
        for other in sorted(self._used_s, key=self._used_s.__getitem__):  # longest unused first
            stale = self._used_s[other] < now_s - _KEPT_S or len(self._lane_sets) > _KEPT
            if stale and other != key and other not in searched:
                del self._lane_sets[other], self._used_s[other]

    def _cut(self, searches: list[Search]) -> list[Found]:
        """End searches whose deadline has passed, with what they found."""
        found = []
        for group in _by_snapshot(searches):
            if on_lanes := [search for search in group if search.among is None]:
                near, nodes = self._lane_sets[id(group[0].target.snapshot)].release(
                    [search.place for search in on_lanes],
                    [search.limit for search in on_lanes],
                    [search.target.hidden for search in on_lanes],
                )
                found += [
                    _ended(search, near[i, : search.limit], nodes[i, : search.limit], _DEADLINE)
                    for i, search in enumerate(on_lanes)
                ]
            for search in group:
                if search.among is not None:
                    found.append(_ended(search, *scans.result(search), _DEADLINE))
        self.running = [search for search in self.running if search.place >= 0]
        return found


def _ended(
    search: Search, near: NDArray[np.float32], nodes: NDArray[np.int32], ending: Ending
) -> Found:
    search.place = -1
    return Found(search, near, nodes, ending)


def _failed(search: Search, error: Exception) -> Found:
    return Found(search, *empty_result(search.limit), Ending.FAILED, str(error))


def _by_snapshot(searches: list[Search]) -> Iterable[list[Search]]:
    """Group searches by the snapshot that they search."""
    if not searches:
        return ()
    first = searches[0].target.snapshot
    if all(search.target.snapshot is first for search in searches):
        return (searches,)
    groups: dict[int, list[Search]] = {}
    for search in searches:
        groups.setdefault(id(search.target.snapshot), []).append(search)
    return groups.values()
