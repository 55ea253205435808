"""A reference search in plain numpy, against which the compiled one is tested; it is slow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import BLOCK, Graph
from .lanes import ENTRIES
from .snapshot import Snapshot
from .space import Rows


def search(
    snapshot: Snapshot, query: Rows, limit: int, itopk: int, hidden: NDArray[np.uint8]
) -> tuple[Rows, NDArray[np.int32]]:
    """Find the nearest rows of one query.

    Args:
        snapshot: the snapshot to search.
        query: (width,), in the coordinates of the space.
        limit: rows to find.
        itopk: nodes that the search keeps.
        hidden: (n,) uint8; 1 for a row that must not be found.

    Returns:
        Up to ``limit`` squared distances and nodes, nearest first, ties by id.
    """
    graph = snapshot.graph
    scaled = query / np.float32(snapshot.scale)
    kept = _walk(graph, scaled, itopk)
    found = [(near, node) for near, node in kept if not hidden[node]]
    if snapshot.exact.shape[0]:
        exact = ((query - snapshot.exact[[node for _, node in found]]) ** 2).sum(1)
        found = sorted((float(near), node) for near, (_, node) in zip(exact, found, strict=True))
    near = np.array([distance for distance, _ in found[:limit]], np.float32)
    if not snapshot.exact.shape[0]:
        near *= np.float32(snapshot.scale**2)
    return near, np.array([node for _, node in found[:limit]], np.int32)


def _walk(graph: Graph, query: Rows, itopk: int) -> list[tuple[float, int]]:
    prefix = graph.seed_rows.shape[1]
    rough = ((query[:prefix] - graph.seed_rows) ** 2).sum(1)
    entries = graph.seed_ids[np.argsort(rough, kind="stable")[:ENTRIES]].tolist()
    kept = sorted((_distance(graph, query, node, np.inf), node) for node in entries)[:itopk]
    seen = set(entries)
    expanded: set[int] = set()
    while (parent := next((node for _, node in kept if node not in expanded), None)) is not None:
        expanded.add(parent)
        for node in graph.neighbours[parent].tolist():
            if node < 0 or node in seen:
                continue
            seen.add(node)
            limit = kept[-1][0] if len(kept) == itopk else np.inf
            distance = _distance(graph, query, node, limit)
            if distance <= limit and distance < np.inf:
                kept = sorted([*kept, (distance, node)])[:itopk]
    return kept


def _distance(graph: Graph, query: Rows, node: int, limit: float) -> float:
    row = graph.codes[node]
    values = row.view(np.float16) if row.dtype == np.uint16 else row
    parts = ((query - values.astype(np.float32)) ** 2).reshape(-1, BLOCK).sum(1).cumsum()
    given_up = (parts > np.float32(limit) * graph.reach).any()
    return float("inf") if given_up else float(parts[-1])
