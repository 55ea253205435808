"""The published sets of ann-benchmarks: rows, queries and true neighbours in one HDF5 file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from ppd.ann.space import Rows
from ppd.errors import ConfigError

_METRICS = ("euclidean", "angular")


@dataclass(frozen=True, slots=True)
class Published:
    """A set of vectors that are compared by squared distance.

    Attributes:
        name: of the file.
        rows: (n, dimensions).
        queries: (q, dimensions).
        truth: (q, limit) nearest rows.
    """

    name: str
    rows: Rows
    queries: Rows
    truth: NDArray[np.int64]


def read(path: Path, limit: int) -> Published:
    """Read a file; with the metric ``angular`` all vectors get unit length.

    Args:
        path: of the file.
        limit: number of true neighbours of a query.

    Raises:
        ConfigError: the file cannot be read, or it lacks something; the message names it.
    """
    try:
        with h5py.File(path, "r") as file:
            metric = file.attrs.get("distance")
            if isinstance(metric, bytes):
                metric = metric.decode()
            if metric not in _METRICS:
                allowed = ", ".join(_METRICS)
                raise ConfigError(
                    f"{path}: the attribute distance is {metric!r}, not one of {allowed}"
                )
            missing = [name for name in ("train", "test", "neighbors") if name not in file]
            if missing:
                raise ConfigError(f"{path}: there is no data set {', '.join(missing)}")
            rows = np.ascontiguousarray(file["train"], np.float32)
            queries = np.ascontiguousarray(file["test"], np.float32)
            truth = np.asarray(file["neighbors"], np.int64)
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    if truth.shape[0] != queries.shape[0] or truth.shape[1] < limit:
        raise ConfigError(
            f"{path}: neighbors is {truth.shape[0]} x {truth.shape[1]}, and must be "
            f"{queries.shape[0]} x {limit} at least"
        )
    if metric == "angular":
        rows, queries = _of_unit_length(rows), _of_unit_length(queries)
    return Published(path.stem, rows, queries, truth[:, :limit])


def _of_unit_length(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0), np.float32)
