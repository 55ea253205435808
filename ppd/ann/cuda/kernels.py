"""The GPU kernels of a search: one program per lane, a whole step in one launch.

They do the same search as ``ppd.ann.kernels``, except that every distance is computed completely.
A program works on its own lane only, in one fixed order. So the result of a lane does not depend
on the other lanes.

A node that is kept is one 64-bit word: its squared distance (the bits of a non-negative float are
in the order of its value), its id, and whether its neighbours have been read. Sorting words sorts
by distance, ties by id.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

EMPTY_WORD = 0x7FFF_FFFF_FFFF_FFFF  # a place without a node; counts as expanded
WAYS = 4  # associativity of the table of visited nodes

_EMPTY_WORD = tl.constexpr(EMPTY_WORD)
_WAYS = tl.constexpr(WAYS)
_ID = tl.constexpr(0x7FFF_FFFF)


def distances_of(words: NDArray[np.int64]) -> NDArray[np.float32]:
    """The squared distances in ``words``; infinity for ``EMPTY_WORD``."""
    near = (words >> 32).astype(np.int32).view(np.float32)
    return np.where(words != EMPTY_WORD, near, np.float32(np.inf))


def nodes_of(words: NDArray[np.int64]) -> NDArray[np.int32]:
    """The ids in ``words``; -1 for ``EMPTY_WORD``."""
    nodes = ((words >> 1) & 0x7FFF_FFFF).astype(np.int32)
    return np.where(words != EMPTY_WORD, nodes, np.int32(-1))


@triton.jit
def _word(near, node):  # type: ignore[no-untyped-def]
    return (near.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (node.to(tl.int64) << 1)


@triton.jit
def _node(word):  # type: ignore[no-untyped-def]
    return (word >> 1) & _ID


@triton.jit
def _distances(query, rows, nodes, wanted, DIM: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """The squared distances to ``rows[nodes]``, (n,); rows that are not wanted count as 0."""
    total = tl.zeros(nodes.shape, tl.float32)
    begin = nodes.to(tl.int64)[:, None] * DIM
    for part in range(DIM // PART):  # not unrolled: rows in flight are registers
        at = part * PART + tl.arange(0, PART)
        query_part = tl.load(query + at)
        row_part = tl.load(rows + begin + at[None, :], mask=wanted[:, None], other=0)
        difference = query_part[None, :] - row_part.to(tl.float32)
        total += tl.sum(difference * difference, 1)
    return total


@triton.jit
def _first_seen(seen, mask, nodes, wanted):  # type: ignore[no-untyped-def]
    """Insert nodes into the table; whether each was not there before.

    Two nodes that map to the same place may be written at once, and one is lost. It is measured
    again if it comes again; the result does not change.
    """
    way = tl.arange(0, _WAYS)
    start = ((nodes.to(tl.uint32) * 2654435769) >> 7).to(tl.int32) & mask & ~(_WAYS - 1)
    held = tl.load(seen + start[:, None] + way[None, :], mask=wanted[:, None], other=-1)
    known = tl.sum((held == nodes[:, None]).to(tl.int32), 1) > 0
    free = tl.min(tl.where(held < 0, way[None, :], _WAYS), 1)
    place = tl.where(free < _WAYS, free, nodes & (_WAYS - 1))
    tl.store(seen + start + place, nodes, mask=wanted & (known == 0))
    return known == 0


@triton.jit
def _merged(words, new, place, KEPT: tl.constexpr, NEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The ``KEPT`` smallest of ``words`` (ascending) and ``new`` (in any order), ascending."""
    new = tl.sort(new, descending=True)
    if NEW < KEPT:
        new = tl.gather(new, tl.maximum(place - (KEPT - NEW), 0), 0)
        new = tl.where(place < KEPT - NEW, _EMPTY_WORD, new)
    return tl.bitonic_merge(tl.minimum(words, new))


@triton.jit
def admit(  # type: ignore[no-untyped-def]
    settings,
    incoming,
    scale,
    seed_ids,
    seed_rows,
    seeds,
    codes,
    query,
    exact_query,
    kept,
    seen,
    seen_size,
    width,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ITOPK: tl.constexpr,
    SEEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SEEDS_AT_ONCE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Set up lanes, and begin their searches at seeds.

    Args:
        settings: (n, 3) int32: lane, width (itopk), slots of ``seen`` to use.
        incoming: (n, DIM) float32, queries in the units of the space.
        scale: one step of the codes in these units.
        seed_ids: (seeds,) int32.
        seed_rows: (seeds, BLOCK) float32, the first dimensions of each seed.
        seeds: number of seeds.
        codes: (nodes, DIM) codes.
        query: (lanes, DIM) float32, in the units of the codes; written.
        exact_query: (lanes, DIM) float32, in the units of the space; written if ``EXACT``.
        kept: (lanes, ITOPK) int64 words, written.
        seen: (lanes, SEEN) int32, written.
        seen_size: (lanes,) int32, slots of ``seen`` in use; written.
        width: (lanes,) int32, itopk; written.
        DIM: dimensions of a row.
        PART: dimensions that are read at once.
        BLOCK: dimensions of a seed row.
        ITOPK: row length of ``kept``.
        SEEN: row length of ``seen``.
        ENTRIES: number of seeds at which a search begins.
        SEEDS_AT_ONCE: seeds that are compared at once.
        EXACT: whether kept nodes are measured again.
    """
    number = tl.program_id(0)
    lane = tl.load(settings + number * 3).to(tl.int64)
    wide = tl.load(settings + number * 3 + 1)
    slots = tl.load(settings + number * 3 + 2)
    incoming += number.to(tl.int64) * DIM
    query += lane * DIM
    exact_query += lane * DIM
    kept += lane * ITOPK
    seen += lane * SEEN
    tl.store(width + lane, wide)
    tl.store(seen_size + lane, slots)
    at = tl.arange(0, BLOCK)
    for begin in range(0, DIM, BLOCK):
        values = tl.load(incoming + begin + at)
        tl.store(query + begin + at, tl.div_rn(values, scale))
        if EXACT:
            tl.store(exact_query + begin + at, values)
    offset = tl.arange(0, SEEDS_AT_ONCE)
    for begin in range(0, ITOPK, SEEDS_AT_ONCE):
        none = tl.full((SEEDS_AT_ONCE,), _EMPTY_WORD, tl.int64)
        tl.store(kept + begin + offset, none, mask=begin + offset < ITOPK)
    for begin in range(0, slots, SEEDS_AT_ONCE):
        tl.store(seen + begin + offset, tl.full((SEEDS_AT_ONCE,), -1, tl.int32))
    entry = tl.arange(0, ENTRIES)
    best = _EMPTY_WORD - entry.to(tl.int64)  # all different, so that the worst one is unique
    start = tl.div_rn(tl.load(incoming + at), scale)
    for begin in range(0, seeds, SEEDS_AT_ONCE):
        number_of = begin + offset
        there = number_of < seeds
        rows = tl.load(
            seed_rows + number_of[:, None] * BLOCK + at[None, :], mask=there[:, None], other=0
        )
        difference = start[None, :] - rows
        rough = tl.where(there, _word(tl.sum(difference * difference, 1), number_of), _EMPTY_WORD)
        for _ in tl.static_range(ENTRIES):
            nearest = tl.min(rough, 0)
            rough = tl.where(rough == nearest, _EMPTY_WORD, rough)
            worst = tl.max(best, 0)
            best = tl.where((best == worst) & (nearest < worst), nearest, best)
    found = best < _EMPTY_WORD - ENTRIES
    nodes = tl.load(seed_ids + _node(best), mask=found, other=0)
    tl.debug_barrier()  # other threads of this program have written the query, and EMPTY_WORD
    near = _distances(query, codes, nodes, found, DIM, PART)
    words = tl.sort(tl.where(found & (near < float("inf")), _word(near, nodes), _EMPTY_WORD))
    tl.store(kept + entry, words, mask=entry < wide)


@triton.jit
def extend(  # type: ignore[no-untyped-def]
    places,
    steps,
    neighbours,
    codes,
    query,
    kept,
    seen,
    seen_size,
    width,
    expanded,
    finished,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    DEGREE: tl.constexpr,
    NEW: tl.constexpr,
    KEPT: tl.constexpr,
    ITOPK: tl.constexpr,
    SEEN: tl.constexpr,
):
    """Expand up to ``steps`` parents in each lane; its kept words stay in registers meanwhile.

    Args:
        places: (n,) int32, lanes; -1 for none.
        steps: (1,) int32, in memory, so that a recorded launch takes any value.
        neighbours: (nodes, DEGREE) int32.
        codes: (nodes, DIM) codes.
        query: (lanes, DIM) float32, in the units of the codes.
        kept: (lanes, ITOPK) int64 words, written.
        seen: (lanes, SEEN) int32, written.
        seen_size: (lanes,) int32, slots of ``seen`` in use.
        width: (lanes,) int32, itopk.
        expanded: (n,) int32, written: number of expansions.
        finished: (n,) int32, written: 1 if no node is left to expand.
        DIM: dimensions of a row.
        PART: dimensions that are read at once.
        DEGREE: neighbours of a node.
        NEW: DEGREE, rounded up to a power of 2.
        KEPT: words of a lane in use: a power of 2, at least NEW and the lane's width.
        ITOPK: row length of ``kept``.
        SEEN: row length of ``seen``.
    """
    number = tl.program_id(0)
    lane = tl.load(places + number).to(tl.int64)
    if lane < 0:
        return
    query += lane * DIM
    kept += lane * ITOPK
    seen += lane * SEEN
    wide = tl.load(width + lane)
    mask = tl.load(seen_size + lane) - 1
    max_steps = tl.load(steps)
    place = tl.arange(0, KEPT)
    edge = tl.arange(0, NEW)
    words = tl.load(kept + place)
    done = 0
    first = tl.min(tl.where((words & 1) == 0, place, KEPT), 0)
    while (first < KEPT) & (done < max_steps):
        parent = _node(tl.min(tl.where(place == first, words, _EMPTY_WORD), 0))
        words = tl.where(place == first, words | 1, words)
        nodes = tl.load(neighbours + parent * DEGREE + edge, mask=edge < DEGREE, other=-1)
        fresh = nodes >= 0
        twice = (nodes[:, None] == nodes[None, :]) & (edge[:, None] > edge[None, :])
        fresh = fresh & (tl.sum(twice.to(tl.int32), 1) == 0)
        fresh = fresh & _first_seen(seen, mask, nodes, fresh)
        # The table is lossy. A lost node is among the kept ones, or is too far as before.
        here = _node(words)[None, :] == nodes.to(tl.int64)[:, None]
        fresh = fresh & (tl.sum(here.to(tl.int32), 1) == 0)
        near = _distances(query, codes, nodes, fresh, DIM, PART)
        new = tl.where(fresh & (near < float("inf")), _word(near, nodes), _EMPTY_WORD)
        words = _merged(words, new, place, KEPT, NEW)
        words = tl.where(place < wide, words, _EMPTY_WORD)
        done += 1
        first = tl.min(tl.where((words & 1) == 0, place, KEPT), 0)
    tl.store(kept + place, words)
    tl.store(expanded + number, done)
    tl.store(finished + number, (first >= KEPT).to(tl.int32))


@triton.jit
def measure_again(  # type: ignore[no-untyped-def]
    places,
    kept,
    query,
    exact,
    words,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    KEPT: tl.constexpr,
    ITOPK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Measure the kept nodes of lanes again by their exact rows, ``AT_ONCE`` per program.

    Args:
        places: (n,) int64, lanes.
        kept: (lanes, ITOPK) int64 words.
        query: (lanes, DIM) float32, in the units of the space.
        exact: (nodes, DIM) float32.
        words: (n, KEPT) int64, written; in the order of ``kept``, all not expanded.
        DIM: dimensions of a row.
        PART: dimensions that are read at once.
        KEPT: words of a lane to measure.
        ITOPK: row length of ``kept``.
        AT_ONCE: words per program.
    """
    number = tl.program_id(0).to(tl.int64)
    lane = tl.load(places + number).to(tl.int64)
    place = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    known = tl.load(kept + lane * ITOPK + place)
    there = known != _EMPTY_WORD
    node = tl.where(there, _node(known), 0)
    near = _distances(query + lane * DIM, exact, node, there, DIM, PART)
    tl.store(words + number * KEPT + place, tl.where(there, _word(near, node), _EMPTY_WORD))
