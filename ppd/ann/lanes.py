"""Lanes: a fixed number of searches that advance together, entering and leaving between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .kernels import Lanes
from .snapshot import Snapshot
from .space import Rows

ENTRIES = 4  # seeds at which a search begins
_CPU_LANES = 32
_LINES_BYTES = 384  # of each row that are prefetched


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A snapshot to search, and the rows that must not be found there.

    Attributes:
        snapshot: the snapshot.
        hidden: (n,) uint8; 1 for a row that must not be found. It may change during a search.
    """

    snapshot: Snapshot
    hidden: NDArray[np.uint8]


class LaneSet(Protocol):
    """Searches over one snapshot that advance together; not thread-safe."""

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """Begin searches in free lanes, of which there must be enough; returns the lanes.

        Args:
            queries: (n, width), in the coordinates of the space.
            widths: itopk of each.
        """

    def extend(self, places: NDArray[np.int64], steps: int) -> int:
        """Do up to ``steps`` expansions in each lane; returns how many were done in all."""

    def finished(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each lane has no node left to expand, so that its result is final."""

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Read the results of lanes and free them.

        Args:
            places: the lanes.
            limits: number of nodes to read, per lane.
            hidden: (n,) uint8; 1 for a row that must not be found.

        Returns:
            Squared distances and nodes, (lanes, largest limit); infinity and -1 where there are
            fewer.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """The device that searches run on.

    Attributes:
        lanes: lanes of an engine, per snapshot.
        reserve: the number of these that are reserved for searches that expired before they began.
        parallel: whether the lanes of a step advance at the same time, not one after the other.
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

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """See ``LaneSet``."""
        assert len(widths) <= len(self.free), "more queries than free lanes"
        places = [self.free.pop() for _ in widths]
        kernels.admit(
            self._snapshot.graph,
            self.lanes,
            np.array(places, np.int64),
            queries,
            np.float32(self._snapshot.scale),
            np.array(widths, np.int32),
            ENTRIES,
        )
        return places

    def extend(self, places: NDArray[np.int64], steps: int) -> int:
        """See ``LaneSet``."""
        done: int = kernels.extend(self._snapshot.graph, self.lanes, places, steps, self._ahead)
        return done

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
        kernels.search_all(
            self._snapshot.graph,
            self.lanes,
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
        if not self._snapshot.exact.shape[0]:
            near *= np.float32(self._snapshot.scale**2)

    def finished(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``LaneSet``."""
        return np.asarray(self.lanes.cursor[places] >= self.lanes.filled[places])

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See ``LaneSet``."""
        shape = len(places), max(limits)
        near = np.empty(shape, np.float32)
        nodes = np.empty(shape, np.int32)
        kernels.collect(
            self.lanes,
            np.array(places, np.int64),
            hidden,
            self._snapshot.exact,
            np.array(limits, np.int32),
            near,
            nodes,
        )
        if not self._snapshot.exact.shape[0]:
            near *= np.float32(self._snapshot.scale**2)
        self.free.extend(places)
        return near, nodes
