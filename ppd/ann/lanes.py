"""A fixed number of searches that advance together, each entering and leaving between steps."""

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

ENTRIES = 4  # seeds that a search begins with
_CPU_LANES = 32
_LINES_BYTES = 384  # of each row to load ahead


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a search goes through, and what it shall not find there.

    Attributes:
        hidden: (n,) uint8; 1: not to be found. May change while it is searched.
    """

    snapshot: Snapshot
    hidden: NDArray[np.uint8]


class LaneSet(Protocol):
    """Searches over one snapshot that advance together. Not for two threads at once."""

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """Queries in the space's rows take free lanes, of which there must be enough."""

    def extend(self, places: NDArray[np.int64], steps: int) -> int:
        """Up to ``steps`` expansions of each lane; how many were done."""

    def finished(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which have no node left to expand: their results are final."""

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Read lanes and free them.

        Args:
            hidden: (n,) uint8; 1: not to be found.

        Returns:
            Squared distances and nodes, (lanes, most k); infinity and -1 where there are fewer.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """What searches run on.

    Attributes:
        lanes: of an engine, for each snapshot.
        reserve: of those, for searches that were late before they began.
        parallel: whether lanes of a step advance at the same time, not one after the other.
        widths: itopk of searches that bring all of its code about.
        make: lanes over a snapshot; how many, and the widest itopk. Raises IndexFileError if there
            is no room for them.
    """

    lanes: int
    reserve: int
    parallel: bool
    widths: tuple[int, ...]
    make: Callable[[Snapshot, int, int], LaneSet]


def cpu_backend() -> Backend:
    return Backend(_CPU_LANES, 1, False, (16,), CpuLaneSet)


def make_lanes(count: int, itopk: int, snapshot: Snapshot) -> Lanes:
    """``count`` free lanes for searches up to ``itopk`` wide."""
    graph = snapshot.graph
    width, degree = graph.codes.shape[1], graph.neighbours.shape[1]
    seen = max(kernels.MIN_SEEN, 1 << (itopk * kernels.SEEN_PER_ITOPK - 1).bit_length())
    return Lanes(
        query=np.zeros((count, width), np.float32),
        exact_query=np.zeros((count, width), np.float32),
        near=np.zeros((count, itopk), np.float32),
        ids=np.zeros((count, itopk), np.int32),
        seen=np.full((count, seen), kernels.EMPTY, np.int32),
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
    """Lanes whose state is in memory, and that compiled code advances."""

    def __init__(self, snapshot: Snapshot, lanes: int, itopk: int) -> None:
        self._snapshot = snapshot
        graph = snapshot.graph
        self.lanes = make_lanes(lanes, itopk, snapshot)
        step = kernels.LINE_BYTES // graph.codes.itemsize
        ahead = min(graph.codes.shape[1], _LINES_BYTES // graph.codes.itemsize)
        self._ahead = np.arange(0, ahead, step, dtype=np.int64)
        self.free = list(range(lanes))[::-1]

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
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
        """Queries in the space's rows, each to its end; all lanes must be free."""
        assert len(self.free) == self.lanes.filled.shape[0], "nobody else is on these lanes"
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
        return np.asarray(self.lanes.cursor[places] >= self.lanes.filled[places])

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        count, most = len(places), max(limits)
        near = np.empty((count, most), np.float32)
        nodes = np.empty((count, most), np.int32)
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
