"""A smooth surface through the measured points of a grid, and how sure it is elsewhere.

A Gaussian process on the logarithms of the axes: a linear trend and departures from it, each axis
with a length of its own, fitted by marginal likelihood (scikit-learn's).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppd.table_file import Axes

Array = NDArray[np.float64]
Cell = tuple[int, int, int, int]

_MIN_NOISE = 0.01**2  # nothing is measured better than to 1 %
_MAX_NOISE = 0.5**2


def cells_of(axes: Axes) -> list[Cell]:
    """Return the cells in the order in which tables index them."""
    sizes = [range(len(bins)) for _, bins in axes.each()]
    return [(c, n, o, q) for c, n, o, q in product(*sizes)]


def places(axes: Axes) -> Array:
    """Return where each cell is measured: shape (cells, 4), axes from 0 to 1 in logarithms."""
    columns = []
    for _, bins in axes.each():
        at = np.log1p([bin_.at for bin_ in bins])
        span = at[-1] - at[0]
        columns.append((at - at[0]) / span if span > 0 else at * 0.0)
    return np.array(list(product(*columns)), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Surface:
    """A fitted surface; its values should be logarithms."""

    process: Any
    mean: float
    noise: float

    @classmethod
    def through(cls, at: Array, values: Sequence[float], like: Surface | None = None) -> Surface:
        """Fit a surface to measured values.

        Args:
            at: shape (n, axes), a place for each of the n ``values``; a place may come again.
            like: as smooth and as noisy as this one, which saves finding that out.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
        from threadpoolctl import threadpool_limits

        y = np.asarray(values, dtype=np.float64)
        lengths = np.full(at.shape[1], 0.7)
        if like is None:
            trend = ConstantKernel(0.1, (1e-4, 1e2)) * DotProduct(1.0, sigma_0_bounds="fixed")
            departures = ConstantKernel(0.1, (1e-4, 1e2)) * RBF(lengths, (0.2, 5.0))
            noise = WhiteKernel(0.03**2, (_MIN_NOISE, _MAX_NOISE))
            process = GaussianProcessRegressor(trend + departures + noise, random_state=0)
        else:
            process = GaussianProcessRegressor(like.process.kernel_, optimizer=None)
        mean = float(y.mean())
        # One thread: the matrices are small, and the cores belong to the workers.
        with threadpool_limits(1), warnings.catch_warnings():
            # A length or a share at its bound is an answer: the axis may not matter.
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(at, y - mean)
        return cls(process, mean, float(process.kernel_.k2.noise_level))

    def at(self, places: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the surface, without the noise of a measurement."""
        mean, deviation = self.process.predict(places, return_std=True)
        return mean + self.mean, np.sqrt(np.maximum(deviation**2 - self.noise, 0.0))
