"""Indexes that need a GPU: the pool's search on it, and exact search of all rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ppd.ann.cuda.backend import backend_on
from ppd.ann.lanes import Target
from ppd.ann.searches import MAX_ITOPK
from ppd.ann.space import Metric, Rows, Space

from . import to_the_end

_LANES = 2048
_ALL = 1 << 30  # expansions of a search
_QUERIES_AT_ONCE = 512  # of the exact search: its distances must fit

Find = Callable[[Rows, int, int], NDArray[np.int64]]


def graph_search(target: Target, limit: int, device: torch.device, most: int = _LANES) -> Find:
    """Search by the graph, ``most`` queries at a time, each to its end."""
    move = _move(target.snapshot.space, device)
    lanes = backend_on(device, most).make(target.snapshot, most, MAX_ITOPK)

    def find(queries: Rows, width: int, threads: int) -> NDArray[np.int64]:
        moved = move(queries).cpu().numpy()
        found = np.empty((queries.shape[0], limit), np.int64)
        for begin in range(0, queries.shape[0], most):
            part = moved[begin : begin + most]
            count = part.shape[0]
            limits = [limit] * count
            nodes = to_the_end.run(lanes, part, [width] * count, _ALL, limits, target.hidden)[1]
            found[begin : begin + count] = nodes
        return found

    return find


def exact_search(target: Target, limit: int, device: torch.device) -> Find:
    """Search all rows: products in TF32 (tensor cores), then the nearest."""
    snapshot = target.snapshot
    rows = snapshot.exact if snapshot.exact.shape[0] else snapshot.graph.codes
    there = torch.from_numpy(np.array(rows, np.float32)).to(device)
    squares = (there * there).sum(1)
    move = _move(snapshot.space, device)

    def find(queries: Rows, width: int, threads: int) -> NDArray[np.int64]:
        moved = move(queries)
        found = []
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        for part in moved.split(_QUERIES_AT_ONCE):
            near = torch.addmm(squares, part, there.T, alpha=-2)
            found.append(near.topk(limit, largest=False).indices)
        torch.backends.cuda.matmul.allow_tf32 = before
        nodes: NDArray[np.int64] = torch.cat(found).cpu().numpy()
        return nodes

    return find


def _move(space: Space, device: torch.device) -> Callable[[Rows], torch.Tensor]:
    """Return what moves queries into a space, on the device: one CPU core takes longer than a GPU's
    whole search.
    """
    assert space.metric is Metric.L2, "queries of other metrics are prepared on the CPU"
    axes, mean = (torch.from_numpy(part).to(device) for part in (space.axes, space.mean))
    return lambda queries: (torch.from_numpy(queries).to(device) - mean) @ axes.T
