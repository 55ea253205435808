"""The edges of rows that are added to a graph while it is searched.

A tree of edges leads from the seeds to every node, and its edges are never replaced. So a node
that is reachable once stays reachable. The other edges in the second half of a node's list are
replaced by shorter ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .instructions import single
from .kernels import BLOCK, NO_NODE, bounded_distance

# (nodes, degree // 2): 1 where an edge of a node's second half belongs to the tree.
TreeMarks = NDArray[np.uint8]


def mark_tree(neighbours: NDArray[np.int32], seeds: NDArray[np.int32]) -> TreeMarks:
    """Build the tree over all nodes that the seeds lead to.

    Edges of first halves are preferred; these are never replaced and need no mark.

    Returns:
        The marks of the second halves' edges that belong to the tree.
    """
    marks = np.zeros((neighbours.shape[0], neighbours.shape[1] // 2), np.uint8)
    _mark_reachable(neighbours, seeds, marks)
    return marks


@njit(nogil=True, cache=True)
def _mark_reachable(neighbours, seeds, marks):  # type: ignore[no-untyped-def]
    n, degree = neighbours.shape
    half = degree - degree // 2
    found = np.zeros(n, np.bool_)
    order = np.empty(n, np.int32)
    count = 0
    for seed in seeds:
        if not found[seed]:
            found[seed] = True
            order[count] = seed
            count += 1
    by_first = by_second = 0  # nodes whose first, second half has been followed
    while by_second < count:
        is_first = by_first < count
        node = order[by_first] if is_first else order[by_second]
        for i in range(0 if is_first else half, half if is_first else degree):
            to = neighbours[node, i]
            if to < 0:
                break
            if not found[to]:
                found[to] = True
                order[count] = to
                count += 1
                if not is_first:
                    marks[node, i - half] = 1
        if is_first:
            by_first += 1
        else:
            by_second += 1


@njit(nogil=True, cache=True)
def link(codes, neighbours, marks, node, near):  # type: ignore[no-untyped-def]
    """Link a new node into the graph: its own edges, then edges that lead to it.

    Args:
        codes: (nodes, width) codes of the rows.
        neighbours: (nodes, degree) int32, written.
        marks: the marks of the tree, as ``mark_tree`` returns them; written.
        node: the new node.
        near: candidates, nearest first; chosen by detour count.
    """
    degree = neighbours.shape[1]
    count = near.shape[0]
    detours = np.zeros(count, np.int32)
    for j in range(count):
        for i in range(j):
            for hop in range(degree):
                if neighbours[near[i], hop] == near[j]:
                    detours[j] += 1
                    break
    place = 0
    fewest = 0
    while place < min(degree, count):
        for j in range(count):
            if detours[j] == fewest and place < degree:
                neighbours[node, place] = near[j]
                place += 1
        fewest += 1
    neighbours[node, place:] = NO_NODE
    if count:
        _hold(codes, neighbours, marks, node, near)
    for j in range(min(place, degree - degree // 2)):
        _link_back(codes, neighbours, marks, neighbours[node, j], node)


@njit(nogil=True, cache=True)
def _hold(codes, neighbours, marks, node, near):  # type: ignore[no-untyped-def]
    """Add an edge of the tree that leads to ``node``.

    It starts at the nearest candidate with room for one, else at a neighbour of a candidate.
    """
    for j in range(near.shape[0]):
        if _lead(codes, neighbours, marks, near[j], node, True):
            return
    for j in range(near.shape[0]):
        for i in range(neighbours.shape[1]):
            there = neighbours[near[j], i]
            if there >= 0 and there != node and _lead(codes, neighbours, marks, there, node, True):
                return


@njit(nogil=True, cache=True)
def _link_back(codes, neighbours, marks, parent, node):  # type: ignore[no-untyped-def]
    for i in range(neighbours.shape[1]):
        if neighbours[parent, i] == node:
            return
    _lead(codes, neighbours, marks, parent, node, False)


@njit(nogil=True, cache=True)
def _lead(codes, neighbours, marks, parent, node, hold):  # type: ignore[no-untyped-def]
    """Add an edge from ``parent`` to ``node``, and return whether there is one now.

    It takes an empty place, or replaces the longest edge of the second half that is not in the
    tree. An edge of the tree (``hold``) always replaces it, another edge only if it is shorter.
    """
    degree = neighbours.shape[1]
    half = degree - degree // 2
    infinity = np.float32(np.inf)
    nothing = np.ones(codes.shape[1] // BLOCK, np.float32)
    row = np.empty(codes.shape[1], np.float32)
    for i in range(row.shape[0]):
        row[i] = single(codes[parent, i])
    longest = np.float32(-1.0)
    place = -1
    for i in range(half, degree):
        there = neighbours[parent, i]
        if there == NO_NODE:
            place = i
            longest = infinity
            break
        if marks[parent, i - half]:
            continue
        distance = bounded_distance(row, codes, there, infinity, nothing)
        if distance > longest:
            longest = distance
            place = i
    if place < 0:
        return False
    if not (hold or bounded_distance(row, codes, node, infinity, nothing) < longest):
        return False
    while place > 0 and neighbours[parent, place - 1] == NO_NODE:
        place -= 1
    neighbours[parent, place] = node
    if hold and place >= half:
        marks[parent, place - half] = 1
    return True
