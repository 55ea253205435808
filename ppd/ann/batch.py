"""Many searches of one kind at once: the plain call, without stages or deadlines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .lanes import LaneSet, Target
from .space import Rows

_STEPS = 16  # between two looks at who is finished


def search(
    target: Target, queries: Rows, limit: int, itopk: int, *, lanes: int = 8, threads: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """
    Args:
        queries: (n, dimensions), as users know them.
        lanes: in lockstep, of each thread.

    Returns:
        Squared distances and nodes, (n, limit); infinity and -1 where there are fewer.
    """
    assert limit <= itopk, "a search finds what it keeps"
    near = np.empty((queries.shape[0], limit), np.float32)
    nodes = np.empty((queries.shape[0], limit), np.int32)
    bounds = np.linspace(0, queries.shape[0], threads + 1).astype(int)
    parts = [slice(int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False)]

    def run(part: slice) -> None:
        _run(target, queries[part], itopk, lanes, near[part], nodes[part])

    if threads == 1:
        run(parts[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, parts))
    return near, nodes


def _run(
    target: Target,
    queries: Rows,
    itopk: int,
    lanes: int,
    near: NDArray[np.float32],
    nodes: NDArray[np.int32],
) -> None:
    count, limit = near.shape
    lane_set = LaneSet(target, lanes=min(lanes, max(1, count)), itopk=itopk)
    moved = target.snapshot.space.queries(queries)
    owner = np.zeros(lanes, np.int64)
    running = np.empty(0, np.int64)
    begun = 0
    while begun < count or running.size:
        new = min(len(lane_set.free), count - begun)
        if new:
            places = np.array(lane_set.admit(moved[begun : begun + new], [itopk] * new))
            owner[places] = np.arange(begun, begun + new)
            running = np.concatenate([running, places])
            begun += new
        lane_set.extend(running, _STEPS)
        finished = lane_set.finished(running)
        if finished.any():
            places = running[finished]
            running = running[~finished]
            near[owner[places]], nodes[owner[places]] = lane_set.release(
                places.tolist(), [limit] * places.size
            )
