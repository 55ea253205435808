"""Builds a graph of fixed degree from each node's nearest neighbours.

The method is CAGRA's (arXiv 2308.15136, section III-B). A detour replaces an edge by two edges of
better rank. The edges with the most detours are pruned. Then the first half of the rest stays, and
reverse edges fill the second half. Ranks stand in for distances, so only ids are read. One step is
not CAGRA's: nodes that no seed leads to are linked from their nearest neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .kernels import NO_NODE
from .neighbours import Ids

Progress = Callable[[str, int, int], None]  # a stage, how much is done, of how much (0: unknown)
_REPAIRS = 4  # rounds


def no_progress(stage: str, done: int, of: int) -> None:
    """Ignore the progress."""


def fixed_degree(
    knn: Ids, degree: int, seeds: Ids, threads: int, progress: Progress = no_progress
) -> tuple[Ids, Ids]:
    """Build a graph of fixed degree.

    Args:
        knn: (n, k) ids, nearest first.
        degree: number of neighbours per node.
        seeds: ids at which searches begin.
        threads: number of threads.
        progress: receives the progress of each stage.

    Returns:
        (n, degree) neighbours, where short lists end with ``NO_NODE``; and the seeds, with one more
        for each component that no edge leads to from elsewhere.
    """
    n = knn.shape[0]
    kept = np.full((n, min(degree, knn.shape[1])), NO_NODE, np.int32)
    bounds = np.linspace(0, n, 16 * threads + 1).astype(np.int64)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda i: _prune(knn, kept, bounds[i], bounds[i + 1]), range(16 * threads))
        for i, _ in enumerate(parts, 1):
            progress("pruning edges", int(bounds[i]), n)
    progress("adding reverse edges", 0, 0)
    graph = np.full((n, degree), NO_NODE, np.int32)
    _merge_reverse(kept, graph)
    for _ in range(_REPAIRS):
        found = reachable(graph, seeds)
        if found.all():
            break
        own = _join(graph, knn, found)
        seeds = np.concatenate([seeds, own])
    return graph, seeds


def reachable(graph: Ids, seeds: Ids) -> NDArray[np.bool_]:
    """Whether each node is reachable from the seeds, (n,)."""
    found = np.zeros(graph.shape[0], np.bool_)
    _walk(graph, seeds, found)
    return found


@njit(nogil=True, cache=True)
def _prune(knn, kept, start, stop):  # type: ignore[no-untyped-def]
    """Keep the edges with the fewest detours, ties by rank."""
    count = knn.shape[1]
    size = 1
    while size < 4 * count:
        size *= 2
    mask = size - 1
    table = np.full(size, NO_NODE, np.int32)
    rank = np.zeros(size, np.int32)
    detours = np.zeros(count, np.int32)
    for node in range(start, stop):
        table[:] = NO_NODE
        detours[:] = 0
        for j in range(count):
            slot = (knn[node, j] * 40503) & mask
            while table[slot] != NO_NODE:
                slot = (slot + 1) & mask
            table[slot] = knn[node, j]
            rank[slot] = j
        for i in range(count):
            between = knn[node, i]
            for hop in range(count):
                other = knn[between, hop]
                slot = (other * 40503) & mask
                while table[slot] != NO_NODE and table[slot] != other:
                    slot = (slot + 1) & mask
                if table[slot] == other:
                    j = rank[slot]
                    if i < j and hop < j:
                        detours[j] += 1
        place = 0
        fewest = 0
        while place < kept.shape[1]:
            for j in range(count):
                if detours[j] == fewest and place < kept.shape[1]:
                    kept[node, place] = knn[node, j]
                    place += 1
            fewest += 1


@njit(nogil=True, cache=True)
def _merge_reverse(kept, graph):  # type: ignore[no-untyped-def]
    """First half: a node's own edges. Second: reverse ones by rank, then its own again."""
    n, own = kept.shape
    degree = graph.shape[1]
    back = np.full((n, degree), NO_NODE, np.int32)
    backs = np.zeros(n, np.int32)
    for place in range(own):
        for node in range(n):
            to = kept[node, place]
            if to >= 0 and backs[to] < degree:
                back[to, backs[to]] = node
                backs[to] += 1
    half = (degree + 1) // 2
    for node in range(n):
        filled = 0
        for place in range(min(half, own)):
            graph[node, filled] = kept[node, place]
            filled += 1
        for place in range(backs[node]):
            if filled == degree:
                break
            filled = _append_new(graph[node], filled, back[node, place])
        for place in range(half, own):
            if filled == degree:
                break
            filled = _append_new(graph[node], filled, kept[node, place])


@njit(inline="always")
def _append_new(row, filled, node):  # type: ignore[no-untyped-def]
    for i in range(filled):
        if row[i] == node:
            return filled
    row[filled] = node
    return filled + 1


@njit(nogil=True, cache=True)
def _walk(graph, seeds, found):  # type: ignore[no-untyped-def]
    """Mark the nodes that are reachable from the seeds without passing marked nodes."""
    stack = np.empty(graph.shape[0], np.int32)
    depth = 0
    for seed in seeds:
        if not found[seed]:
            found[seed] = True
            stack[depth] = seed
            depth += 1
    while depth:
        depth -= 1
        node = stack[depth]
        for i in range(graph.shape[1]):
            to = graph[node, i]
            if to < 0:
                break
            if not found[to]:
                found[to] = True
                stack[depth] = to
                depth += 1


@njit(nogil=True, cache=True)
def _join(graph, knn, found):  # type: ignore[no-untyped-def]
    """Make every unreachable node reachable, and return those that must become seeds.

    A node is linked from the nearest of its neighbours that is reachable; without one it becomes a
    seed. The edge replaces one of the last edges there. The node which that one led to may be
    unreachable then; the next round repairs it.
    """
    n, degree = graph.shape
    seeds = np.empty(n, np.int32)
    count = 0
    start = np.empty(1, np.int32)
    for node in range(n):
        if found[node]:
            continue
        linked = False
        for j in range(knn.shape[1]):
            near = knn[node, j]
            if found[near]:
                place = degree - 1 - node % (degree // 2)
                while place > 0 and graph[near, place - 1] < 0:
                    place -= 1
                graph[near, place] = node
                linked = True
                break
        if not linked:
            seeds[count] = node
            count += 1
        start[0] = node
        _walk(graph, start, found)
    return seeds[:count]
