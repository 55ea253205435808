"""Lanes: a fixed number of searches that advance together, entering and leaving between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .kernels import Lanes
from .snapshot import Snapshot
from .space import Rows

ENTRIES = 4  # seeds at which a search begins
_CPU_LANES = 32
_LINES_BYTES = 384  # of each row that are prefetched
_NO_LANES, _NO_WIDTHS = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A snapshot to search, and the rows that must not be found there.

    Attributes:
        snapshot: the snapshot.
        hidden: (n,) uint8; 1 for a row that must not be found. It may change during a search.
    """

    snapshot: Snapshot
    hidden: NDArray[np.uint8]


class Advanced(NamedTuple):
    """Lanes after a step; those that finished are free again.

    Attributes:
        expansions: expansions that were done in all.
        finished: (lanes,) whether each lane had no node left to expand, so that its result is
            final.
        near: (lanes, largest limit) squared distances of those that finished; infinity where
            there are fewer. Rows of other lanes are undefined.
        nodes: (lanes, largest limit) their nodes; -1 where there are fewer.
    """

    expansions: int
    finished: NDArray[np.bool_]
    near: NDArray[np.float32]
    nodes: NDArray[np.int32]


class Whole(NamedTuple):
    """The result of a search that ran to its end in one call.

    Attributes:
        expansions: expansions that were done.
        near: (limit,) squared distances; infinity where there are fewer.
        nodes: (limit,) their nodes; -1 where there are fewer.
    """

    expansions: int
    near: NDArray[np.float32]
    nodes: NDArray[np.int32]


class LaneSet(Protocol):
    """Searches over one snapshot that advance together; not thread-safe."""

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """Begin searches in free lanes, of which there must be enough; returns the lanes.

        Args:
            queries: (n, width), in the coordinates of the space.
            widths: itopk of each.
        """

    def advance(
        self,
        places: Sequence[int],
        steps: int,
        limits: Sequence[int],
        hidden: Sequence[NDArray[np.uint8]],
    ) -> Advanced:
        """Do up to ``steps`` expansions in each lane, and free the lanes that finish.

        Args:
            places: the lanes.
            steps: maximum number of expansions of a lane.
            limits: number of nodes to read, per lane.
            hidden: for each lane (n,) uint8; 1 for a row that must not be found.
        """

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Read the results of lanes so far, and free the lanes.

        Args:
            places: the lanes.
            limits: number of nodes to read, per lane.
            hidden: for each lane (n,) uint8; 1 for a row that must not be found.

        Returns:
            Squared distances and nodes, (lanes, largest limit); infinity and -1 where there are
            fewer.
        """


class CoreLaneSet(LaneSet, Protocol):
    """Lanes of a core, which serves one after the other."""

    def whole(self, query: Rows, width: int, limit: int, hidden: NDArray[np.uint8]) -> Whole:
        """Run one search from its begin to its end; it takes no lane.

        Args:
            query: (1, width), in the coordinates of the space.
            width: its itopk.
            limit: number of nodes to find.
            hidden: (n,) uint8; 1 for a row that must not be found.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """The device that searches run on.

    Attributes:
        lanes: lanes of an engine, per snapshot.
        reserve: the number of these that are reserved for searches that expired before they began.
        parallel: whether the lanes of a step advance at the same time, not one after the other.
            If not, ``make`` returns a ``CoreLaneSet``.
        widths: itopk values of warm-up searches that together compile all of the code.
        make: creates lanes over a snapshot, given their number and the largest itopk. It raises
            IndexFileError if there is no memory for them.
    """

    lanes: int
    reserve: int
    parallel: bool
    widths: tuple[int, ...]
    make: Callable[[Snapshot, int, int], LaneSet]


def cpu_backend() -> Backend:
    """The CPU as the backend of an engine."""
    return Backend(_CPU_LANES, 1, False, (16,), CpuLaneSet)


def make_lanes(count: int, itopk: int, snapshot: Snapshot) -> Lanes:
    """Allocate ``count`` free lanes for searches up to ``itopk`` wide."""
    graph = snapshot.graph
    width, degree = graph.codes.shape[1], graph.neighbours.shape[1]
    seen = max(kernels.MIN_SEEN, 1 << (itopk * kernels.SEEN_PER_ITOPK - 1).bit_length())
    return Lanes(
        query=np.zeros((count, width), np.float32),
        exact_query=np.zeros((count, width), np.float32),
        near=np.zeros((count, itopk), np.float32),
        ids=np.zeros((count, itopk), np.int32),
        seen=np.full((count, seen), kernels.NO_NODE, np.int32),
        seen_size=np.full(count, seen, np.int32),
        width=np.zeros(count, np.int32),
        filled=np.zeros(count, np.int32),
        cursor=np.zeros(count, np.int32),
        expansions=np.zeros(count, np.int32),
        distances=np.zeros(count, np.int32),
        pending=np.zeros((count, degree), np.int32),
        pending_count=np.zeros(count, np.int32),
        rough=np.zeros(graph.seed_ids.shape[0], np.float32),
        again_near=np.zeros(itopk, np.float32),
        again_ids=np.zeros(itopk, np.int32),
        owner=np.zeros(count, np.int64),
        running=np.arange(count),
    )


class CpuLaneSet:
    """Lanes on the CPU, advanced by compiled code.

    Args:
        snapshot: the snapshot to search.
        lanes: number of lanes.
        itopk: the largest itopk of a search.

    Attributes:
        lanes: the state of the lanes.
        free: the lanes that are free.
    """

    def __init__(self, snapshot: Snapshot, lanes: int, itopk: int) -> None:
        self._snapshot = snapshot
        graph = snapshot.graph
        self.lanes = make_lanes(lanes, itopk, snapshot)
        step = kernels.LINE_BYTES // graph.codes.itemsize
        ahead = min(graph.codes.shape[1], _LINES_BYTES // graph.codes.itemsize)
        self._ahead = np.arange(0, ahead, step, dtype=np.int64)
        self.free = list(range(lanes))[::-1]
        self._new: list[tuple[list[int], Rows, Sequence[int]]] = []
        self._itopk = itopk
        self._lane_of_whole: Lanes | None = None
        self._no_queries = np.empty((0, graph.codes.shape[1]), np.float32)

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """See ``LaneSet``. The next call computes where they begin."""
        assert len(widths) <= len(self.free), "more queries than free lanes"
        assert max(widths) <= self._itopk, "a search that is wider than the lanes"
        places = [self.free.pop() for _ in widths]
        self._new.append((places, queries, widths))
        return places

    def advance(
        self,
        places: Sequence[int],
        steps: int,
        limits: Sequence[int],
        hidden: Sequence[NDArray[np.uint8]],
    ) -> Advanced:
        """See ``LaneSet``."""
        shape = len(places), max(limits)
        near, nodes = np.empty(shape, np.float32), np.empty(shape, np.int32)
        finished = np.empty(len(places), np.bool_)
        at, many = np.array(places, np.int64), np.array(limits, np.int32)
        snapshot, exact = self._snapshot, self._snapshot.exact
        is_shared = all(one is hidden[0] for one in hidden)
        done: int = kernels.turn(
            snapshot.graph,
            self.lanes,
            *self._entering(),
            np.float32(snapshot.scale),
            ENTRIES,
            at,
            steps,
            self._ahead,
            hidden[0],
            exact,
            many,
            is_shared,
            finished,
            near,
            nodes,
        )
        for i, is_over in enumerate(finished.tolist()):
            if is_over:
                self.free.append(places[i])
                if not is_shared:
                    one = slice(i, i + 1)
                    kernels.collect(
                        self.lanes, at[one], hidden[i], exact, many[one], near[one], nodes[one]
                    )
        return Advanced(done, finished, self._unscaled(near), nodes)

    def search_all(
        self,
        queries: Rows,
        width: int,
        hidden: NDArray[np.uint8],
        near: NDArray[np.float32],
        nodes: NDArray[np.int32],
    ) -> None:
        """Run every query to its end; all lanes must be free.

        Args:
            queries: (n, width), in the coordinates of the space.
            width: itopk of the searches.
            hidden: (n,) uint8; 1 for a row that must not be found.
            near: (n, limit) float32, written: squared distances.
            nodes: (n, limit) int32, written.
        """
        assert len(self.free) == self.lanes.filled.shape[0], "all lanes must be free"
        self._run(self.lanes, queries, width, hidden, near, nodes)

    def whole(self, query: Rows, width: int, limit: int, hidden: NDArray[np.uint8]) -> Whole:
        """See ``CoreLaneSet``."""
        if self._lane_of_whole is None:
            self._lane_of_whole = make_lanes(1, self._itopk, self._snapshot)
        lane = self._lane_of_whole
        near, nodes = np.empty((1, limit), np.float32), np.empty((1, limit), np.int32)
        self._run(lane, query, width, hidden, near, nodes)
        return Whole(int(lane.expansions[0]), near[0], nodes[0])

    def _run(
        self,
        lanes: Lanes,
        queries: Rows,
        width: int,
        hidden: NDArray[np.uint8],
        near: NDArray[np.float32],
        nodes: NDArray[np.int32],
    ) -> None:
        """Run every query to its end in free lanes; see ``search_all``."""
        assert width <= self._itopk, "a search that is wider than the lanes"
        kernels.search_all(
            self._snapshot.graph,
            lanes,
            queries,
            np.float32(self._snapshot.scale),
            width,
            ENTRIES,
            self._ahead,
            hidden,
            self._snapshot.exact,
            near,
            nodes,
        )
        self._unscaled(near)

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See ``LaneSet``."""
        new, queries, widths = self._entering()
        snapshot = self._snapshot
        scale = np.float32(snapshot.scale)
        kernels.admit(snapshot.graph, self.lanes, new, queries, scale, widths, ENTRIES)
        shape = len(places), max(limits)
        near, nodes = np.empty(shape, np.float32), np.empty(shape, np.int32)
        at, many = np.array(places, np.int64), np.array(limits, np.int32)
        for i in range(len(places)):
            one = slice(i, i + 1)
            kernels.collect(
                self.lanes, at[one], hidden[i], snapshot.exact, many[one], near[one], nodes[one]
            )
        self.free.extend(places)
        return self._unscaled(near), nodes

    def _entering(self) -> tuple[NDArray[np.int64], Rows, NDArray[np.int32]]:
        """Lanes, queries and widths of the searches that were admitted since the last call."""
        if not self._new:
            return _NO_LANES, self._no_queries, _NO_WIDTHS
        if len(self._new) == 1:
            ((places, queries, widths),) = self._new
        else:
            places = [place for new in self._new for place in new[0]]
            queries = np.concatenate([new[1] for new in self._new])
            widths = [width for new in self._new for width in new[2]]
        self._new = []
        return np.array(places, np.int64), queries, np.array(widths, np.int32)

    def _unscaled(self, near: NDArray[np.float32]) -> NDArray[np.float32]:
        """Distances in the space's units; those that were measured again are so already."""
        if not self._snapshot.exact.shape[0]:
            with np.errstate(invalid="ignore", over="ignore"):  # places that no search has written
                near *= np.float32(self._snapshot.scale**2)
        return near
