"""What is searched, as arrays that nobody changes: rows, graph, seeds, and how to read them."""

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

_SURE = 0.995  # quantile of what the first dimensions tell of the whole distance
_SIZED = 0.999  # share of rows whose codes are not cut off
_PAIRS = 20_000


class Precision(StrEnum):
    """How rows are kept for the search. All but fp32 are measured again from fp32 at the end."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Shape:
    """What ``build`` may choose.

    Attributes:
        degree: neighbours of a node in the graph.
        knn: neighbours that these are chosen from.
        seeds: nodes where a search may begin; None: the square root of the rows.
    """

    degree: int = 32
    knn: int = 64
    seeds: int | None = None

    def check(self) -> None:
        """Raises:
        ConfigError: no graph has that shape.
        """
        if not 4 <= self.degree <= self.knn <= 512:
            raise ConfigError(
                f"degree and knn must be 4 <= degree <= knn <= 512, got {self.degree}, {self.knn}"
            )
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"seeds must be 1 or more, got {self.seeds}")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """
    Attributes:
        scale: one step of the codes in the space's units.
        exact: (n, width) float32; (0, 0) where the codes are exact themselves.
        keys: (n,) int64, what users' ids are stored under.
        written: nodes that ``ppd.ann.growth`` has written since: each when its row is there, before
            any edge leads to it, and all whose edges changed when they have. Whoever has a copy of
            the arrays reads on from where he was.
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
        """Without rows, and so without a graph."""
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
        return int(self.keys.shape[0])

    @property
    def has_graph(self) -> bool:
        """Without one all rows must be looked at."""
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
    """
    Args:
        rows: (n, dimensions), finite, n at least 1.
        space: None: one is fitted to the rows.

    Raises:
        ConfigError, IndexFileError: neighbours cannot be found by ``finder``.
    """
    progress("choosing seeds", 0, 0)
    space = space or Space.fit(rows, metric, seed)
    moved = space.rows(rows)
    n = moved.shape[0]
    seeds = choose_seeds(moved, shape.seeds or _default_seeds(n), seed)
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
    """Rows as codes, and what one step of them is worth."""
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
    """But for a few rows, which are cut off: one of another size than the rest would make all of
    their codes alike."""
    of_each = np.maximum(moved.max(1), -moved.min(1))
    return float(np.quantile(of_each, _SIZED)) or float(of_each.max())


def choose_seeds(moved: Rows, count: int, seed: int) -> NDArray[np.int32]:
    """Rows that searches begin from: each crowd shall have one.

    Three quarters are the rows nearest to centres of clusters. Clustering merges small crowds into
    large ones far away, so the rest are, one after the other, the rows farthest from all seeds.
    """
    import faiss

    n = moved.shape[0]
    count = max(1, min(count, n // 8))
    source = np.random.default_rng(seed)
    chosen = np.sort(source.choice(n, min(n, 64 * count), replace=False))
    some = moved[chosen]
    clusters = max(1, 3 * count // 4)
    kmeans = faiss.Kmeans(moved.shape[1], clusters, niter=8, seed=seed, verbose=False)
    kmeans.cp.min_points_per_centroid = 1
    kmeans.train(some)
    _, nearest = faiss.knn(kmeans.centroids, some, 1)
    seeds = list(nearest[:, 0])
    alone, _ = faiss.knn(some, some[seeds], 1)
    far = alone[:, 0]
    for _ in range(count - clusters):
        seeds.append(int(far.argmax()))
        far = np.minimum(far, ((some - some[seeds[-1]]) ** 2).sum(1))
    return np.unique(chosen[seeds]).astype(np.int32)


def _default_seeds(count: int) -> int:
    return max(256, min(int(count**0.5), 4096))


def seed_rows(moved: Rows, seeds: NDArray[np.int32], scale: float) -> Rows:
    """What seeds are compared by: their first dimensions, close together."""
    return np.asarray(moved[seeds, :BLOCK] / np.float32(scale), np.float32, order="C")


def reach(moved: Rows, neighbours: NDArray[np.int32], seed: int) -> Rows:
    """For each block: the share of a distance up to it, that next to none exceeds.

    Taken between nodes two edges apart, as those are that a search has to tell apart.
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
    shares: Rows = np.quantile(sums / sums[:, -1:], _SURE, axis=0).astype(np.float32)
    shares[-1] = 1.0
    return shares
