"""Batch search: many queries in one call, without stages or deadlines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from . import process
from .lanes import CpuLaneSet, Target
from .space import Rows

LANES = 8  # in lockstep: while one row is loaded from memory, another one is measured


class Searcher:
    """A batch search whose lanes are kept from call to call; not thread-safe.

    Args:
        target: the snapshot to search.
        itopk: the largest itopk of a search.
        lanes: lanes per thread.
        threads: number of threads.
    """

    def __init__(self, target: Target, itopk: int, *, lanes: int = LANES, threads: int = 1) -> None:
        self._target = target
        snapshot = target.snapshot
        self._lane_sets = [CpuLaneSet(snapshot, lanes, itopk) for _ in range(threads)]
        self._cores = iter(process.own_cores(threads) or ())
        self._pool = ThreadPoolExecutor(threads, initializer=self._begin) if threads > 1 else None

    def search(
        self, queries: Rows, limit: int, itopk: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Find the nearest rows of each query.

        Args:
            queries: (n, dimensions), in the users' space.
            limit: rows to find per query.
            itopk: nodes that a search keeps; at least ``limit``.

        Returns:
            Squared distances and nodes, (n, limit); infinity and -1 where there are fewer.
        """
        assert limit <= itopk, "a search finds what it keeps"
        near = np.empty((queries.shape[0], limit), np.float32)
        nodes = np.empty((queries.shape[0], limit), np.int32)
        if self._pool is None:
            self._run(self._lane_sets[0], queries, itopk, near, nodes)
        else:
            bounds = np.linspace(0, queries.shape[0], len(self._lane_sets) + 1).astype(int)
            futures = [
                self._pool.submit(self._run, lanes, queries[a:b], itopk, near[a:b], nodes[a:b])
                for lanes, a, b in zip(self._lane_sets, bounds, bounds[1:], strict=False)
            ]
            for future in futures:
                future.result()
        return near, nodes

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self) -> None:
        """Pin a new thread of the pool to a core of its own, if there are enough cores."""
        if (core := next(self._cores, None)) is not None:
            process.stay_on(core)

    def _run(
        self,
        lanes: CpuLaneSet,
        queries: Rows,
        itopk: int,
        near: NDArray[np.float32],
        nodes: NDArray[np.int32],
    ) -> None:
        moved = self._target.snapshot.space.queries(queries)
        lanes.search_all(moved, itopk, self._target.hidden, near, nodes)


def search(
    target: Target,
    queries: Rows,
    limit: int,
    itopk: int,
    *,
    lanes: int = LANES,
    threads: int = 1,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Find the nearest rows of each query in one call of ``Searcher.search``."""
    searcher = Searcher(target, itopk, lanes=lanes, threads=threads)
    try:
        return searcher.search(queries, limit, itopk)
    finally:
        searcher.close()
