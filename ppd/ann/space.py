"""The space of an index: coordinates in which every metric is a squared distance.

Cosine becomes the distance of unit vectors. Inner product becomes the distance of vectors with
one more dimension, which makes all lengths equal (Bachrach et al., RecSys 2014). Then rows are
rotated onto the principal axes of the collection. A rotation changes no distance, but it lets a
search reject most rows after a part of their dimensions.
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
_SAMPLE = 50_000  # rows to which the axes are fitted
_SLACK = 1.0 + 1e-5  # factor on the longest row's length, for rounding
_NO_LENGTH = 0.25  # square below which a row of length 1 or 0 has length 0


class Metric(StrEnum):
    """The metric by which users compare vectors."""

    L2 = "l2"
    IP = "ip"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class Space:
    """The transformation between the users' vectors and the rows of an index.

    Attributes:
        metric: the users' metric.
        dimensions: dimensions of the users' vectors.
        length: length of the longest row (``ip``), else 0.
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
        """Fit a space to rows.

        Args:
            rows: (n, dimensions), n at least 1.
            metric: the users' metric.
            seed: seed of the random sample.
            length: length up to which an ``ip`` space takes rows, if none of ``rows`` is longer.
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
        """Create a space without rows to fit it to; not for ``ip``, which needs the longest row."""
        assert metric is not Metric.IP, "the longest row is not known"
        width = -(-dimensions // BLOCK) * BLOCK
        axes = np.eye(width, dimensions, dtype=np.float32)
        return cls(metric, dimensions, 0.0, np.zeros(dimensions, np.float32), axes)

    @property
    def width(self) -> int:
        """Dimensions of the rows of the index."""
        return int(self.axes.shape[0])

    def rows(self, rows: Rows) -> Rows:
        """Transform (n, dimensions) users' rows to (n, width) rows of the index.

        Raises:
            RequestError: a row is longer than ``length`` of an ``ip`` space.
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
        """Transform rows of the index back to users' rows; ``cosine`` rows have length 1 or 0."""
        rows = np.asarray((moved @ self.axes + self.mean)[:, : self.dimensions], np.float32)
        if self.metric is Metric.COSINE:
            rows[_squares(rows) < _NO_LENGTH] = 0.0  # rounding would give it a direction
        return rows

    def queries(self, queries: Rows) -> Rows:
        """Transform (n, dimensions) queries to (n, width).

        Each query is transformed by itself, in compiled code. In a matrix product, the rounding of
        one query would depend on the others.
        """
        out = np.empty((queries.shape[0], self.width), np.float32)
        unit = self.metric is Metric.COSINE
        _turn(queries, self.mean, self.axes, unit, out)
        return out

    def scores(self, queries: Rows, distances: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convert squared distances to the users' metric.

        Args:
            queries: (n, dimensions) users' queries.
            distances: (n, k) squared distances.

        Returns:
            (n, k) squared distances, inner products or cosines.
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
