"""Finds each row's nearest neighbours, the candidates for the graph's edges: by faiss or cuVS."""

from __future__ import annotations

import logging
from enum import StrEnum
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from ppd.errors import ConfigError, IndexFileError

logger = logging.getLogger("ppd_router.pool")

Ids = NDArray[np.int32]
_FEW = 8192  # rows up to which every pair is compared


class Finder(StrEnum):
    """The library that finds neighbours.

    Attributes:
        AUTO: cuVS if it is installed and works; else faiss.
        FAISS: faiss, on the CPU.
        CUVS: cuVS, on the GPU.
    """

    AUTO = "auto"
    FAISS = "faiss"
    CUVS = "cuvs"


def nearest_neighbours(
    rows: NDArray[np.float32], count: int, threads: int, finder: Finder = Finder.FAISS
) -> Ids:
    """Find each row's nearest neighbours by NN-descent, or exactly if rows are few.

    Args:
        rows: (n, width).
        count: neighbours per row.
        threads: threads of faiss.
        finder: the library to use.

    Returns:
        (n, count) ids, nearest first; fewer columns if there are not enough rows.

    Raises:
        ConfigError: cuVS was requested and is not installed.
        IndexFileError: cuVS fails, for lack of a GPU or of its memory.
    """
    n = rows.shape[0]
    count = min(count, n - 1)
    if n <= _FEW:
        return _exactly(rows, count, threads)
    if finder is Finder.CUVS:
        return _by_cuvs(rows, count)
    if finder is Finder.AUTO and find_spec("cuvs") is not None:
        try:
            return _by_cuvs(rows, count)
        except (ConfigError, IndexFileError) as error:
            logger.warning("faiss finds neighbours: %s", error)
    return _by_faiss(rows, count, threads)


def _exactly(rows: NDArray[np.float32], count: int, threads: int) -> Ids:
    import faiss  # slow to import, and needed only here

    faiss.omp_set_num_threads(threads)
    _, found = faiss.knn(rows, rows, count + 1)
    return _without_self(found.astype(np.int32))[:, :count]


def _by_faiss(rows: NDArray[np.float32], count: int, threads: int) -> Ids:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.IndexNNDescentFlat(rows.shape[1], count, faiss.METRIC_L2)
    index.nndescent.S = 12
    index.nndescent.R = 48
    index.nndescent.L = count + 32
    index.nndescent.iter = 12
    index.verbose = False
    index.add(rows)
    flat = faiss.vector_to_array(index.nndescent.final_graph)
    return np.ascontiguousarray(flat.reshape(rows.shape[0], -1)[:, :count], dtype=np.int32)


def _by_cuvs(rows: NDArray[np.float32], count: int) -> Ids:
    """Send the rows to the GPU and fetch the graph (cuVS 26.10, ``nn_descent.pyx``)."""
    try:
        from cuvs.neighbors import nn_descent
    except ImportError as error:
        raise ConfigError(
            f"cuVS cannot be loaded ({error}): pip install cuvs-cu13, or find neighbours by faiss"
        ) from error
    try:
        params = nn_descent.IndexParams(
            metric="sqeuclidean",
            graph_degree=count + 1,
            intermediate_graph_degree=2 * (count + 1),
        )
        graph = np.asarray(nn_descent.build(params, np.ascontiguousarray(rows)).graph)
    except Exception as error:  # cuVS' own, CUDA's, RMM's
        raise IndexFileError(f"cuVS: {error}; faiss finds neighbours without a card") from error
    if graph.max() >= rows.shape[0]:
        raise IndexFileError("cuVS: its graph has places that nothing was found for")
    return _without_self(graph.astype(np.int32))


def _without_self(found: Ids) -> Ids:
    """Drop one id of each row: its own, or the last one if its own is missing.

    Among equal rows, the row's own id need not be the first.
    """
    own = found == np.arange(found.shape[0], dtype=np.int32)[:, None]
    out = np.where(own.any(1), own.argmax(1), found.shape[1] - 1)
    kept = np.ones(found.shape, np.bool_)
    kept[np.arange(found.shape[0]), out] = False
    return np.ascontiguousarray(found[kept].reshape(found.shape[0], -1))
