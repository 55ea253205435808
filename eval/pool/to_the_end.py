"""Searches that advance together until the last one of them is finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ppd.ann.lanes import LaneSet
from ppd.ann.space import Rows


def run(
    lanes: LaneSet,
    queries: Rows,
    widths: Sequence[int],
    steps: int,
    limits: Sequence[int],
    hidden: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Begin searches in lanes, and advance these until all are finished.

    Args:
        lanes: the lanes; enough of them must be free.
        queries: (n, width), in the coordinates of the space.
        widths: itopk of each search.
        steps: maximum expansions of a lane between two looks at what is finished.
        limits: number of nodes to find, of each search.
        hidden: (rows,) uint8; 1 for a row that must not be found.

    Returns:
        Squared distances and nodes, (n, largest limit); infinity and -1 where there are fewer.
    """
    places = np.array(lanes.admit(queries, widths), np.int64)
    wanted = np.array(limits)
    near = np.full((places.size, max(limits)), np.inf, np.float32)
    nodes = np.full((places.size, max(limits)), -1, np.int32)
    left = np.arange(places.size)
    while left.size:
        of_left = wanted[left].tolist()
        at = lanes.advance(places[left].tolist(), steps, of_left, [hidden] * left.size)
        assert at.expansions > 0 or at.finished.all(), "no search advances"
        over, cut = left[at.finished], slice(0, max(of_left))
        near[over, cut], nodes[over, cut] = at.near[at.finished], at.nodes[at.finished]
        left = left[~at.finished]
    return near, nodes
