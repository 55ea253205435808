"""The compiled part of a search: queries enter lanes, lanes are extended, results are read.

Every function releases the GIL. It works on one lane after the other, on that lane's rows only.
So the result of a lane depends on its query and the graph, not on the other lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .instructions import prefetch, single

# Dimensions between two checks whether a row can still be near enough. A loop of 32 is unrolled
# before it is vectorised, and then takes ten times as long; so does one of unknown length.
BLOCK = 64
NO_NODE = -1  # stands where an array has no node
MIN_SEEN = 2048
SEEN_PER_ITOPK = 32  # slots; a search visits about 20 nodes for each node that it keeps
_PROBES = 8  # slots of the visited table that are probed: half a cache line
LINE_BYTES = 64

# Sums may be taken in any order: that is what makes them vector instructions. The order is fixed
# when the function is compiled, so equal inputs give equal bits.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


# Without reference counts (numba #2345): every view of a row would update a count that threads
# share. These functions allocate nothing, so no count is needed.
compiled = njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy", _nrt=False)


class Graph(NamedTuple):
    """The graph that is searched.

    Attributes:
        codes: (n, width) rows as codes; float32, uint16 (half precision) or int8.
        neighbours: (n, degree) int32, short lists end with ``NO_NODE``.
        seed_ids: (seeds,) int32, nodes at which searches begin.
        seed_rows: (seeds, BLOCK) float32, first dimensions of the seeds, in units of the codes.
        reach: (width / BLOCK,) float32, see ``bounded_distance``.
    """

    codes: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]
    neighbours: NDArray[np.int32]
    seed_ids: NDArray[np.int32]
    seed_rows: NDArray[np.float32]
    reach: NDArray[np.float32]


class Lanes(NamedTuple):
    """The state of ``lanes`` searches, each up to ``itopk`` wide.

    Attributes:
        query: (lanes, dimensions) float32, in the units of the codes.
        exact_query: (lanes, dimensions) float32, in the units of the space.
        near: (lanes, itopk) float32, squared distances, ascending; ties by id.
        ids: (lanes, itopk) int32; ``~id`` once a node's neighbours have been read.
        seen: (lanes, 2^n) int32, ids of visited nodes. Entries may be overwritten, so a visited
            node may be missing. A search uses the first ``seen_size`` slots.
        seen_size: (lanes,) int32, a power of 2 that grows with the width.
        width: (lanes,) int32, number of ``ids`` to keep.
        filled: (lanes,) int32, number of ``ids`` so far.
        cursor: (lanes,) int32, number of leading ``ids`` that are all expanded.
        expansions: (lanes,) int32, expansions so far.
        distances: (lanes,) int32, distances computed so far.
        pending: (lanes, degree) int32, nodes to measure in the current step.
        pending_count: (lanes,) int32, number of these.
        rough: (seeds,) float32, scratch of the current lane.
        again_near: (itopk,) float32, scratch of the current lane.
        again_ids: (itopk,) int32, scratch of the current lane.
        owner: (lanes,) int64, query of each lane in ``search_all``.
        running: (lanes,) int64, lanes in use in ``search_all``, then free ones.
    """

    query: NDArray[np.float32]
    exact_query: NDArray[np.float32]
    near: NDArray[np.float32]
    ids: NDArray[np.int32]
    seen: NDArray[np.int32]
    seen_size: NDArray[np.int32]
    width: NDArray[np.int32]
    filled: NDArray[np.int32]
    cursor: NDArray[np.int32]
    expansions: NDArray[np.int32]
    distances: NDArray[np.int32]
    pending: NDArray[np.int32]
    pending_count: NDArray[np.int32]
    rough: NDArray[np.float32]
    again_near: NDArray[np.float32]
    again_ids: NDArray[np.int32]
    owner: NDArray[np.int64]
    running: NDArray[np.int64]


@compiled
def bounded_distance(query, codes, node, limit, reach):  # type: ignore[no-untyped-def]
    """The squared distance; infinity as soon as it is unlikely to be below ``limit``.

    Args:
        query: (width,) float32.
        codes: (n, width).
        node: row of ``codes``.
        limit: squared distance.
        reach: (blocks,) for each block, a share of the distance that the blocks up to it rarely
            exceed.
    """
    row = codes[node]
    total = np.float32(0.0)
    for block in range(query.shape[0] // BLOCK):
        query_part = query[block * BLOCK : block * BLOCK + BLOCK]
        row_part = row[block * BLOCK : block * BLOCK + BLOCK]
        part = np.float32(0.0)
        for i in range(BLOCK):
            difference = query_part[i] - single(row_part[i])
            part += difference * difference
        total += part
        if total > limit * reach[block]:
            return np.float32(np.inf)
    return total


@njit(inline="always")
def _first_seen(seen, mask, node):  # type: ignore[no-untyped-def]
    """Insert ``node`` into the table; whether it was not there before."""
    start = ((np.uint32(node) * np.uint32(2654435769)) >> np.uint32(7)) & np.uint32(mask)
    slot = np.int64(start)
    for _ in range(_PROBES):
        there = seen[slot]
        if there == node:
            return False
        if there == NO_NODE:
            seen[slot] = node
            return True
        slot = (slot + 1) & mask
    seen[np.int64(start)] = node
    return True


@njit(inline="always")
def _insert(near, ids, width, filled, distance, node):  # type: ignore[no-untyped-def]
    """Keep a node if it is among the ``width`` nearest; returns its place, or ``width``.

    The table of visited nodes is lossy, so a node may come twice. It is not kept again then.
    """
    low, high = 0, filled
    while low < high:
        middle = (low + high) >> 1
        there = near[middle]
        known = ids[middle]
        if known < 0:
            known = ~known
        if there < distance or (there == distance and known < node):
            low = middle + 1
        else:
            high = middle
    if low < filled and near[low] == distance:
        known = ids[low]
        if known == node or ~known == node:
            return width
    if low >= width:
        return width
    last = filled if filled < width else width - 1
    for i in range(last, low, -1):
        near[i] = near[i - 1]
        ids[i] = ids[i - 1]
    near[low] = distance
    ids[low] = node
    return low


@compiled
def admit(graph, lanes, places, queries, scale, widths, entries):  # type: ignore[no-untyped-def]
    """Begin searches: ``queries[i]`` in lane ``places[i]``, at its nearest seeds.

    Args:
        graph: the ``Graph``.
        lanes: the ``Lanes``, written.
        places: (n,) int64, free lanes.
        queries: (n, dimensions) float32, as ``Space.queries`` returns them.
        scale: one step of the codes in the space's units.
        widths: (n,) int32, itopk of each search.
        entries: number of seeds at which each search begins.
    """
    for i in range(places.shape[0]):
        _enter(graph, lanes, places[i], queries[i], scale, widths[i], entries)


@compiled
def _enter(graph, lanes, lane, given, scale, width, entries):  # type: ignore[no-untyped-def]
    seeds = graph.seed_ids.shape[0]
    rough = lanes.rough
    query, near, ids = lanes.query[lane], lanes.near[lane], lanes.ids[lane]
    for j in range(query.shape[0]):
        lanes.exact_query[lane, j] = given[j]
        query[j] = given[j] / scale
    size = MIN_SEEN
    while size < min(SEEN_PER_ITOPK * width, lanes.seen.shape[1]):
        size *= 2
    lanes.seen_size[lane] = size
    lanes.seen[lane, :size] = NO_NODE
    lanes.width[lane] = width
    lanes.cursor[lane] = 0
    lanes.expansions[lane] = 0
    start = query[:BLOCK]
    for seed in range(seeds):
        row = graph.seed_rows[seed]
        part = np.float32(0.0)
        for j in range(BLOCK):
            difference = start[j] - row[j]
            part += difference * difference
        rough[seed] = part
    filled = 0
    for _ in range(min(entries, seeds)):
        best = 0
        for seed in range(1, seeds):
            if rough[seed] < rough[best]:
                best = seed
        rough[best] = np.float32(np.inf)
        node = graph.seed_ids[best]
        _first_seen(lanes.seen[lane], size - 1, node)
        distance = bounded_distance(query, graph.codes, node, np.float32(np.inf), graph.reach)
        if _insert(near, ids, width, filled, distance, node) < width and filled < width:
            filled += 1
    lanes.filled[lane] = filled
    lanes.distances[lane] = filled


@njit(inline="always")
def _gather(graph, lanes, lane, lines):  # type: ignore[no-untyped-def]
    """Make the next parent's unvisited neighbours pending, and prefetch their rows."""
    ids = lanes.ids[lane]
    cursor, filled = lanes.cursor[lane], lanes.filled[lane]
    while cursor < filled and ids[cursor] < 0:
        cursor += 1
    lanes.cursor[lane] = cursor
    count = 0
    mask = lanes.seen_size[lane] - 1
    if cursor < filled:
        parent = ids[cursor]
        ids[cursor] = ~parent
        lanes.expansions[lane] += 1
        for i in range(graph.neighbours.shape[1]):
            node = graph.neighbours[parent, i]
            if node < 0:
                break
            if _first_seen(lanes.seen[lane], mask, node):
                lanes.pending[lane, count] = node
                count += 1
                for line in lines:
                    prefetch(graph.codes, node, line)
    lanes.pending_count[lane] = count
    return cursor < filled


@njit(inline="always", fastmath=_FAST, error_model="numpy")
def _measure(graph, lanes, lane):  # type: ignore[no-untyped-def]
    """Measure the pending nodes, keep the near ones, and prefetch the next parent's edges."""
    query, near, ids = lanes.query[lane], lanes.near[lane], lanes.ids[lane]
    width, filled, cursor = lanes.width[lane], lanes.filled[lane], lanes.cursor[lane]
    limit = near[width - 1] if filled == width else np.float32(np.inf)
    count = lanes.pending_count[lane]
    for i in range(count):
        node = lanes.pending[lane, i]
        distance = bounded_distance(query, graph.codes, node, limit, graph.reach)
        if distance > limit or distance == np.inf:
            continue
        place = _insert(near, ids, width, filled, distance, node)
        if place < width:
            if filled < width:
                filled += 1
            if filled == width:
                limit = near[width - 1]
            if place < cursor:
                cursor = place
    lanes.filled[lane] = filled
    lanes.distances[lane] += count
    while cursor < filled and ids[cursor] < 0:
        cursor += 1
    lanes.cursor[lane] = cursor
    if cursor < filled:
        parent = ids[cursor]
        for i in range(0, graph.neighbours.shape[1], 16):
            prefetch(graph.neighbours, parent, i)


@compiled
def extend(graph, lanes, places, steps, lines):  # type: ignore[no-untyped-def]
    """Expand up to ``steps`` parents in each lane of ``places``, all in lockstep.

    Args:
        graph: the ``Graph``.
        lanes: the ``Lanes``, written.
        places: (n,) int64, lanes.
        steps: maximum number of expansions per lane.
        lines: (m,) int64, first elements of the cache lines of a row that are prefetched.

    Returns:
        The number of expansions; a lane without unexpanded nodes does none.
    """
    done = 0
    for _ in range(steps):
        busy = 0
        for i in range(places.shape[0]):
            if _gather(graph, lanes, places[i], lines):
                busy += 1
        if busy == 0:
            break
        done += busy
        for i in range(places.shape[0]):
            _measure(graph, lanes, places[i])
    return done


@compiled
def turn(  # type: ignore[no-untyped-def]
    graph,
    lanes,
    new,
    queries,
    widths,
    scale,
    entries,
    places,
    steps,
    lines,
    hidden,
    exact,
    limits,
    read,
    finished,
    out_near,
    out_nodes,
):
    """Begin searches, extend lanes, and read those that finish.

    Args:
        graph: the ``Graph``.
        lanes: the ``Lanes``, written.
        new: (m,) int64, free lanes, in which searches begin.
        queries: of ``new``, as in ``admit``.
        widths: of ``new``, as in ``admit``.
        scale: as in ``admit``.
        entries: as in ``admit``.
        places: (n,) int64, lanes to extend.
        steps: as in ``extend``.
        lines: as in ``extend``.
        hidden: as in ``collect``.
        exact: as in ``collect``.
        limits: as in ``collect``.
        read: whether lanes that finish are read.
        finished: (n,) bool, written: whether each lane has no node left to expand.
        out_near: as in ``collect``; rows of lanes that are not read are not written.
        out_nodes: the same.

    Returns:
        The number of expansions.
    """
    admit(graph, lanes, new, queries, scale, widths, entries)
    done = extend(graph, lanes, places, steps, lines)
    for i in range(places.shape[0]):
        lane = places[i]
        finished[i] = lanes.cursor[lane] >= lanes.filled[lane]
        if read and finished[i]:
            _leave(lanes, lane, hidden, exact, limits[i], out_near[i], out_nodes[i])
    return done


@compiled
def collect(lanes, places, hidden, exact, limits, out_near, out_nodes):  # type: ignore[no-untyped-def]
    """Read the nearest nodes of lanes that are not hidden, nearest first.

    Args:
        lanes: the ``Lanes``.
        places: (n,) int64, lanes.
        hidden: (nodes,) uint8; 1 for a node that must not be found.
        exact: (nodes, dimensions) float32 to measure the kept nodes again, or (0, 0).
        limits: (n,) int32, number of nodes per lane.
        out_near: (n, largest limit) float32, written; infinity where there are fewer.
        out_nodes: (n, largest limit) int32, written; -1 where there are fewer.
    """
    for i in range(places.shape[0]):
        _leave(lanes, places[i], hidden, exact, limits[i], out_near[i], out_nodes[i])


@compiled
def _leave(lanes, lane, hidden, exact, wanted, out_near, out_nodes):  # type: ignore[no-untyped-def]
    again = exact.shape[0] > 0
    near, nodes = lanes.again_near, lanes.again_ids
    query = lanes.exact_query[lane]
    filled = lanes.filled[lane]
    if again:
        for j in range(filled):
            node = lanes.ids[lane, j]
            if node < 0:
                node = ~node
            for at in range(0, exact.shape[1], LINE_BYTES // 4):
                prefetch(exact, node, at)
    count = 0
    for j in range(filled):
        node = lanes.ids[lane, j]
        if node < 0:
            node = ~node
        if hidden[node]:
            continue
        distance = lanes.near[lane, j]
        if again:
            distance = np.float32(0.0)
            row = exact[node]
            for at in range(query.shape[0]):
                difference = query[at] - row[at]
                distance += difference * difference
        elif count == wanted:
            break
        place = count
        while place and (
            near[place - 1] > distance or (near[place - 1] == distance and nodes[place - 1] > node)
        ):
            near[place] = near[place - 1]
            nodes[place] = nodes[place - 1]
            place -= 1
        near[place] = distance
        nodes[place] = node
        count += 1
    for j in range(out_near.shape[0]):
        if j < count and j < wanted:
            out_near[j] = near[j]
            out_nodes[j] = nodes[j]
        else:
            out_near[j] = np.inf
            out_nodes[j] = NO_NODE


@compiled
def search_all(  # type: ignore[no-untyped-def]
    graph, lanes, queries, scale, width, entries, ahead, hidden, exact, out_near, out_nodes
):
    """Run every query to its end; a query enters as soon as a lane is free.

    Args:
        graph: the ``Graph``.
        lanes: the ``Lanes``, written; all must be free.
        queries: (n, dimensions) float32, as ``Space.queries`` returns them.
        scale: one step of the codes in the space's units.
        width: itopk of the searches.
        entries: number of seeds at which each search begins.
        ahead: ``lines`` of ``extend``.
        hidden: as in ``collect``.
        exact: as in ``collect``.
        out_near: (n, limit) float32, written; infinity where there are fewer.
        out_nodes: (n, limit) int32, written; -1 where there are fewer.
    """
    count = queries.shape[0]
    lane_count = lanes.filled.shape[0]
    owner, running = lanes.owner, lanes.running
    busy = 0
    begun = 0
    while busy or begun < count:
        while busy < lane_count and begun < count:
            # ``running`` holds the busy lanes first, then the free ones.
            lane = running[busy]
            owner[lane] = begun
            _enter(graph, lanes, lane, queries[begun], scale, width, entries)
            busy += 1
            begun += 1
        for i in range(busy):
            _gather(graph, lanes, running[i], ahead)
        i = 0
        while i < busy:
            lane = running[i]
            _measure(graph, lanes, lane)
            if lanes.cursor[lane] < lanes.filled[lane]:
                i += 1
                continue
            number = owner[lane]
            limit = out_near.shape[1]
            _leave(lanes, lane, hidden, exact, limit, out_near[number], out_nodes[number])
            busy -= 1
            running[i] = running[busy]
            running[busy] = lane  # the lane that took its place is measured next


@compiled
def scan(graph, query, nodes, near, found, filled):  # type: ignore[no-untyped-def]
    """Find the nearest of ``nodes`` by measuring all of them.

    Args:
        graph: the ``Graph``.
        query: (dimensions,) float32, in the units of the codes.
        nodes: (n,) int32, nodes to measure.
        near: (k,) float32, squared distances of the nearest nodes; written.
        found: (k,) int32, these nodes; written.
        filled: number of nodes in ``near`` and ``found`` from earlier calls.

    Returns:
        The number of nodes in ``near`` and ``found`` now.
    """
    width = near.shape[0]
    for i in range(nodes.shape[0]):
        if i + 4 < nodes.shape[0]:
            prefetch(graph.codes, nodes[i + 4], 0)
            prefetch(graph.codes, nodes[i + 4], 16)
        limit = near[width - 1] if filled == width else np.float32(np.inf)
        distance = bounded_distance(query, graph.codes, nodes[i], limit, graph.reach)
        if distance > limit or distance == np.inf:
            continue
        if _insert(near, found, width, filled, distance, nodes[i]) < width and filled < width:
            filled += 1
    return filled
