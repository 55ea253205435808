"""One space for every metric: all are squared distances there, and the first dimensions say most.

Cosine is the distance of unit vectors. Inner product is that of vectors with one more dimension,
which brings all to one length (Bachrach et al., RecSys 2014). Then rows are turned onto the
principal axes of the collection, which changes no distance, but lets a search give up on most
rows after a part of their dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ppd.errors import RequestError

from .kernels import BLOCK

Rows = NDArray[np.float32]
_SAMPLE = 50_000  # rows that the axes are fitted to
_SLACK = 1.0 + 1e-5  # of the longest row's length, for rounding


class Metric(StrEnum):
    L2 = "l2"
    IP = "ip"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class Space:
    """
    Attributes:
        dimensions: of the vectors that users know.
        length: of the longest row (``ip``), else 0.
        mean: (d,) float32, d being ``dimensions``, for ``ip`` one more.
        axes: (width, d) float32; width is d rounded up to whole blocks, the rest zeros.
    """

    metric: Metric
    dimensions: int
    length: float
    mean: Rows
    axes: Rows

    @classmethod
    def fit(cls, rows: Rows, metric: Metric, seed: int, length: float = 0.0) -> Space:
        """To (n, dimensions) rows, n at least 1.

        Args:
            length: of the longest row that an ``ip`` space shall take, if none of these is longer.
        """
        if metric is Metric.IP:
            length = max(length, float(np.sqrt(_squares(rows).max())) * _SLACK)
        source = np.random.default_rng(seed)
        chosen = rows
        if rows.shape[0] > _SAMPLE:
            chosen = rows[np.sort(source.choice(rows.shape[0], _SAMPLE, replace=False))]
        prepared = _prepared(chosen, metric, length).astype(np.float64)
        mean = prepared.mean(0)
        centred = prepared - mean
        _, axes = np.linalg.eigh(centred.T @ centred)
        d = mean.shape[0]
        padded = np.zeros((-(-d // BLOCK) * BLOCK, d), np.float32)
        padded[:d] = axes.T[::-1]
        return cls(metric, rows.shape[1], length, mean.astype(np.float32), padded)

    @classmethod
    def plain(cls, dimensions: int, metric: Metric) -> Space:
        """For rows that nothing is known of yet. Not for ``ip``, which must know the longest."""
        assert metric is not Metric.IP, "the longest row is not known"
        width = -(-dimensions // BLOCK) * BLOCK
        axes = np.eye(width, dimensions, dtype=np.float32)
        return cls(metric, dimensions, 0.0, np.zeros(dimensions, np.float32), axes)

    @property
    def width(self) -> int:
        return int(self.axes.shape[0])

    def rows(self, rows: Rows) -> Rows:
        """(n, dimensions) as the index keeps them: (n, width).

        Raises:
            RequestError: a row is longer than any that an ``ip`` space was made for.
        """
        if self.metric is Metric.IP and rows.shape[0]:
            longest = float(np.sqrt(_squares(rows).max()))
            if longest > self.length:
                raise RequestError(
                    f"a vector has length {longest:.6g}; an index for inner products takes none "
                    f"longer than its longest at building, {self.length:.6g}: build it anew from "
                    "a file that has this one",
                    param="vector",
                )
        out = np.empty((rows.shape[0], self.width), np.float32)
        for start in range(0, rows.shape[0], 16384):
            part = slice(start, start + 16384)
            out[part] = (_prepared(rows[part], self.metric, self.length) - self.mean) @ self.axes.T
        return out

    def users(self, moved: Rows) -> Rows:
        """The rows that ``rows`` was given, but for rounding; those of ``cosine`` of length 1."""
        return np.asarray((moved @ self.axes + self.mean)[:, : self.dimensions], np.float32)

    def queries(self, queries: Rows) -> Rows:
        """(n, dimensions) queries as (n, width).

        Each by itself, in compiled code: a matrix product would round one query differently
        beside others than alone.
        """
        out = np.empty((queries.shape[0], self.width), np.float32)
        unit = self.metric is Metric.COSINE
        _turn(queries, self.mean, self.axes, unit, out)
        return out

    def scores(self, queries: Rows, distances: NDArray[np.float32]) -> NDArray[np.float32]:
        """What users know: squared distance, inner product, or cosine.

        Args:
            distances: (n, k) squared, of ``n`` queries.
        """
        match self.metric:
            case Metric.L2:
                return distances
            case Metric.COSINE:
                return np.float32(1.0) - distances / np.float32(2.0)
            case Metric.IP:
                square = _squares(queries)[:, None] + np.float32(self.length**2)
                return ((square - distances) / 2.0).astype(np.float32)


def _squares(rows: Rows) -> Rows:
    return np.asarray(np.einsum("ij,ij->i", rows, rows), np.float32)


def _prepared(rows: Rows, metric: Metric, length: float) -> Rows:
    match metric:
        case Metric.L2:
            return rows
        case Metric.COSINE:
            lengths = np.sqrt(_squares(rows))[:, None]
            return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)
        case Metric.IP:
            rest = np.sqrt(np.maximum(length**2 - _squares(rows), 0.0))
            return np.concatenate([rows, rest[:, None]], 1, dtype=np.float32)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _turn(queries, mean, axes, unit, out):  # type: ignore[no-untyped-def]
    known = queries.shape[1]
    d = mean.shape[0]
    moved = np.empty(d, np.float32)
    for i in range(queries.shape[0]):
        length = np.float32(1.0)
        if unit:
            square = np.float32(0.0)
            for j in range(known):
                square += queries[i, j] * queries[i, j]
            if square > 0:
                length = np.float32(1.0) / np.sqrt(square)
        for j in range(d):
            moved[j] = -mean[j]
        for j in range(known):
            moved[j] += queries[i, j] * length
        for row in range(axes.shape[0]):
            axis = axes[row]
            total = np.float32(0.0)
            for j in range(d):
                total += axis[j] * moved[j]
            out[i, row] = total
