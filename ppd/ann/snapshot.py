"""The snapshot of an index: immutable arrays of rows, graph and seeds, and how they are built."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ppd.errors import ConfigError

from .graph import Progress, fixed_degree, no_progress
from .kernels import BLOCK, Graph
from .neighbours import Finder, nearest_neighbours
from .space import Metric, Rows, Space

_REACH_QUANTILE = 0.995  # of the share of a distance that lies in its first dimensions
_UNCLIPPED = 0.999  # share of rows whose codes are not clipped
_PAIRS = 20_000
_SAMPLED = 16  # rows for each seed, from which the seeds are chosen
MAX_KNN = 512


class Precision(StrEnum):
    """The number format of the codes that a search reads.

    Results of all formats but fp32 are measured again from fp32 rows at the end.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a graph.

    Attributes:
        degree: neighbours of a node in the graph.
        knn: nearest neighbours from which these are chosen.
        seeds: number of nodes at which a search may begin; None for four times the square
            root of the rows, 256 to 8,192. At most an eighth of the rows are.
    """

    degree: int = 48
    knn: int = 96
    seeds: int | None = None

    def check(self) -> None:
        """Validate the shape.

        Raises:
            ConfigError: a value is out of range.
        """
        if not 4 <= self.degree <= self.knn <= MAX_KNN:
            raise ConfigError(
                f"degree and knn must be 4 <= degree <= knn <= {MAX_KNN}, "
                f"got {self.degree}, {self.knn}"
            )
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"seeds must be 1 or more, got {self.seeds}")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """An index as immutable arrays, except for rows that ``ppd.ann.growth`` adds.

    Attributes:
        space: the coordinates of the rows.
        precision: the number format of the codes.
        scale: one step of the codes in the space's units.
        graph: codes, neighbours and seeds.
        exact: (n, width) float32; (0, 0) where the codes are exact themselves.
        keys: (n,) int64, keys of the users' ids.
        written: log of the nodes that ``ppd.ann.growth`` has written. A new node is appended when
            its row is complete, before any edge leads to it; then every node whose edges changed.
            A copy of the arrays (``Mirror``) is updated from the part of the log it has not read.
    """

    space: Space
    precision: Precision
    scale: float
    graph: Graph
    exact: Rows
    keys: NDArray[np.int64]
    written: array[int] = field(default_factory=lambda: array("i"))

    @classmethod
    def empty(cls, space: Space, degree: int) -> Snapshot:
        """Create a snapshot without rows, and so without a graph."""
        graph = Graph(
            codes=np.empty((0, space.width), np.float32),
            neighbours=np.empty((0, degree), np.int32),
            seed_ids=np.empty(0, np.int32),
            seed_rows=np.empty((0, BLOCK), np.float32),
            reach=np.ones(space.width // BLOCK, np.float32),
        )
        exact = np.empty((0, 0), np.float32)
        return cls(space, Precision.FP32, 1.0, graph, exact, np.empty(0, np.int64))

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.keys.shape[0])

    @property
    def has_graph(self) -> bool:
        """Whether there is a graph to follow; without one a search scans all rows."""
        return bool(self.graph.seed_ids.size)


def build(
    rows: Rows,
    keys: NDArray[np.int64],
    metric: Metric,
    precision: Precision,
    shape: Shape,
    *,
    threads: int,
    seed: int,
    space: Space | None = None,
    finder: Finder = Finder.FAISS,
    progress: Progress = no_progress,
) -> Snapshot:
    """Build a snapshot.

    Args:
        rows: (n, dimensions), finite, n at least 1.
        keys: (n,) keys of the users' ids, ascending.
        metric: the users' metric.
        precision: the number format of the codes.
        shape: the size of the graph.
        threads: number of threads.
        seed: seed of all random choices.
        space: the space; None to fit one to the rows.
        finder: the library that finds neighbours.
        progress: receives the progress of each stage.

    Raises:
        ConfigError: ``finder`` is not installed.
        IndexFileError: ``finder`` fails.
    """
    progress("choosing seeds", 0, 0)
    space = space or Space.fit(rows, metric, seed)
    moved = space.rows(rows)
    n = moved.shape[0]
    seeds = choose_seeds(moved, shape.seeds or default_seeds(n), seed)
    if n > 1:
        progress("finding neighbours", 0, 0)
        knn = nearest_neighbours(moved, shape.knn, threads, finder)
        neighbours, seeds = fixed_degree(knn, shape.degree, seeds, threads, progress)
    else:
        neighbours = np.full((n, shape.degree), -1, np.int32)
    progress("coding rows", 0, 0)
    codes, scale = encode(moved, precision)
    graph = Graph(
        codes=codes,
        neighbours=neighbours,
        seed_ids=seeds,
        seed_rows=seed_rows(moved, seeds, scale),
        reach=reach(moved, neighbours, seed),
    )
    exact = np.empty((0, 0), np.float32) if precision is Precision.FP32 else moved
    return Snapshot(space, precision, scale, graph, exact, keys)


def encode(
    moved: Rows, precision: Precision, scale: float | None = None
) -> tuple[NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8], float]:
    """Encode rows of the space; returns the codes and the scale of one step.

    Args:
        moved: (n, width) rows in the space's coordinates.
        precision: the number format.
        scale: the scale to use for int8; None to fit it to the rows.
    """
    match precision:
        case Precision.FP32:
            return moved, 1.0
        case Precision.FP16:
            return moved.astype(np.float16).view(np.uint16), 1.0
        case Precision.INT8:
            if scale is None:
                scale = _largest(moved) / 127.0 or 1.0
            return np.clip(np.rint(moved / scale), -127, 127).astype(np.int8), scale


def _largest(moved: Rows) -> float:
    """The largest coordinate, except in a few rows, whose codes are clipped.

    A row that is much larger than the rest would reduce all other codes to a few values.
    """
    row_max = np.maximum(moved.max(1), -moved.min(1))
    return float(np.quantile(row_max, _UNCLIPPED)) or float(row_max.max())


def choose_seeds(moved: Rows, count: int, seed: int) -> NDArray[np.int32]:
    """Choose the rows at which searches begin, so that every cluster has one.

    Three quarters of them are the rows nearest to centres of clusters. Clustering merges small
    clusters into large ones far away. So the rest are, one after the other, the rows farthest from
    all seeds.

    Args:
        moved: (n, width) rows in the space's coordinates.
        count: number of seeds.
        seed: seed of the random choices.

    Returns:
        Ids of the seeds, ascending.
    """
    import faiss

    n = moved.shape[0]
    count = max(1, min(count, n // 8))
    source = np.random.default_rng(seed)
    chosen = np.sort(source.choice(n, min(n, _SAMPLED * count), replace=False))
    sample = moved[chosen]
    clusters = max(1, 3 * count // 4)
    kmeans = faiss.Kmeans(moved.shape[1], clusters, niter=4, seed=seed, verbose=False)
    kmeans.cp.min_points_per_centroid = 1
    kmeans.train(sample)
    _, nearest = faiss.knn(kmeans.centroids, sample, 1)
    seeds = list(nearest[:, 0])
    nearest_sq, _ = faiss.knn(sample, sample[seeds], 1)
    far, norms_sq = nearest_sq[:, 0], np.einsum("ij,ij->i", sample, sample)
    for _ in range(count - clusters):
        seeds.append(int(far.argmax()))
        apart_sq = norms_sq + norms_sq[seeds[-1]] - 2.0 * (sample @ sample[seeds[-1]])
        far = np.minimum(far, apart_sq)
    return np.unique(chosen[seeds]).astype(np.int32)


def default_seeds(count: int) -> int:
    """How many seeds an index of so many rows has, at most."""
    return max(256, min(4 * int(count**0.5), 8192))


def seed_rows(moved: Rows, seeds: NDArray[np.int32], scale: float) -> Rows:
    """The first dimensions of the seeds, (seeds, BLOCK), in units of the codes.

    Args:
        moved: (n, width) rows in the space's coordinates.
        seeds: ids of the seeds.
        scale: one step of the codes.
    """
    return np.asarray(moved[seeds, :BLOCK] / np.float32(scale), np.float32, order="C")


def reach(moved: Rows, neighbours: NDArray[np.int32], seed: int) -> Rows:
    """For each block, a share of the squared distance that the blocks up to it rarely exceed.

    It is estimated between nodes two edges apart, because a search compares such nodes.

    Args:
        moved: (n, width) rows in the space's coordinates.
        neighbours: (n, degree) the graph.
        seed: seed of the random choices.

    Returns:
        (blocks,) shares; the last one is 1.
    """
    source = np.random.default_rng(seed)
    n = moved.shape[0]
    blocks = moved.shape[1] // BLOCK
    start = source.integers(n, size=_PAIRS)
    middle = neighbours[start, source.integers(neighbours.shape[1], size=_PAIRS)]
    end = neighbours[middle, source.integers(neighbours.shape[1], size=_PAIRS)]
    real = (middle >= 0) & (end >= 0) & (end != start)
    parts = (moved[start[real]] - moved[end[real]]) ** 2
    sums = parts.reshape(-1, blocks, BLOCK).sum(2).cumsum(1)
    sums = sums[sums[:, -1] > 0]
    if not sums.shape[0]:
        return np.ones(blocks, np.float32)
    shares: Rows = np.quantile(sums / sums[:, -1:], _REACH_QUANTILE, axis=0).astype(np.float32)
    shares[-1] = 1.0
    return shares
