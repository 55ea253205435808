"""Collections of made-up vectors for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppd.ann.lanes import Target
from ppd.ann.snapshot import Precision, Shape, Snapshot, build
from ppd.ann.space import Metric, Rows, Space


def clustered(count: int, dimensions: int, clusters: int, seed: int) -> Rows:
    """Tight clusters far apart: what few seeds lose."""
    source = np.random.default_rng(seed)
    centres = source.normal(size=(clusters, dimensions)) * 3
    chosen = source.integers(clusters, size=count)
    rows = centres[chosen] + source.normal(size=(count, dimensions)) * 0.5
    return rows.astype(np.float32)


def made(
    rows: Rows,
    metric: Metric = Metric.L2,
    precision: Precision = Precision.FP32,
    shape: Shape = Shape(degree=16, knn=32, seeds=128),  # noqa: B008
) -> Snapshot:
    keys = np.arange(rows.shape[0], dtype=np.int64)
    return build(rows, keys, metric, precision, shape, threads=2, seed=0)


def whole_numbers(count: int, width: int, seed: int) -> Snapshot:
    """Rows of small integers in a space that is not turned: every sum is exact."""
    rows = np.random.default_rng(seed).integers(-8, 9, size=(count, width)).astype(np.float32)
    space = Space.plain(width, Metric.L2)
    keys = np.arange(count, dtype=np.int64)
    shape = Shape(degree=16, knn=32, seeds=32)
    return build(rows, keys, Metric.L2, Precision.FP32, shape, threads=2, seed=0, space=space)


def target_of(snapshot: Snapshot) -> Target:
    return Target(snapshot, np.zeros(snapshot.keys.shape[0], np.uint8))


def truth(rows: Rows, queries: Rows, limit: int, metric: Metric) -> NDArray[np.int64]:
    """By looking at all of them."""
    if metric is Metric.COSINE:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    if metric is Metric.L2:
        near = ((queries[:, None, :] - rows[None]) ** 2).sum(2)
    else:
        near = -(queries @ rows.T)
    return np.argsort(near, axis=1, kind="stable")[:, :limit]


def recall(found: NDArray[np.int32], wanted: NDArray[np.int64]) -> float:
    pairs = zip(found.tolist(), wanted.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))
