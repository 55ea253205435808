"""Searches among given rows, which are all measured instead of following the graph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .searches import Search, empty_result

_AGAIN_PER_LIMIT, _AGAIN_MORE = 4, 32  # scanned rows that are measured again, per limit and more


def begin(search: Search) -> None:
    """Make room for the result."""
    search.place = 0
    search.near, search.nodes = empty_result(_kept(search))


def advance(search: Search, among: NDArray[np.int32], rows: int) -> None:
    """Measure the next rows of ``among``."""
    part = among[search.scanned : search.scanned + rows]
    snapshot = search.target.snapshot
    # Every row is measured to its end: ``reach`` is an estimate.
    graph = snapshot.graph._replace(reach=np.ones_like(snapshot.graph.reach))
    query = search.query[0] / np.float32(snapshot.scale)
    search.filled = kernels.scan(graph, query, part, search.near, search.nodes, search.filled)
    search.scanned += part.size


def result(search: Search) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The squared distances and the nodes that were found so far, nearest first."""
    snapshot = search.target.snapshot
    if not snapshot.exact.shape[0]:
        return search.near * np.float32(snapshot.scale**2), search.nodes
    near, nodes = empty_result(search.limit)
    found = search.nodes[: search.filled]
    distances = ((snapshot.exact[found] - search.query) ** 2).sum(1)
    best = np.lexsort((found, distances))[: search.limit]
    near[: best.size], nodes[: best.size] = distances[best], found[best]
    return near, nodes


def _kept(search: Search) -> int:
    """The number of scanned rows to keep, before they are measured again."""
    if not search.target.snapshot.exact.shape[0]:
        return search.limit
    return _AGAIN_PER_LIMIT * search.limit + _AGAIN_MORE
