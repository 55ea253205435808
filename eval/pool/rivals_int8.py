"""Indexes whose rows have one byte a dimension, as the pool's own codes have.

Each one measures its best candidates again by the rows in fp32, as the pool does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ppd.ann.space import Rows

from .given import Given

Ids = NDArray[np.int64]
Find = Callable[[Rows, int, int], Ids]

_AGAIN = 4  # candidates that are measured again, for each row to find
_LEVELS = 127.0
_QUERIES_AT_ONCE = 64  # their candidates fit into the cache


def faiss_hnsw_sq(links: int, effort: int, limit: int) -> Callable[[Given], Find]:
    """Return the maker of faiss' HNSW over 8-bit codes, refined by faiss."""

    def make(given: Given) -> Find:
        rows, threads = given.rows, given.threads
        faiss.omp_set_num_threads(threads)
        index: Any = faiss.index_factory(rows.shape[1], f"HNSW{links}_SQ8,Refine(Flat)")
        codes: Any = faiss.downcast_index(index.base_index)
        codes.hnsw.efConstruction = effort
        index.train(rows)
        index.add(rows)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            faiss.omp_set_num_threads(threads)
            codes.hnsw.efSearch = width
            index.k_factor = max(1.0, min(float(_AGAIN), width / limit))
            return np.asarray(index.search(queries, limit)[1], np.int64)

        return find

    return make


def usearch_i8(links: int, effort: int, limit: int) -> Callable[[Given], Find]:
    """Return the maker of usearch's HNSW over int8 rows; it does not refine, so numpy does."""

    def make(given: Given) -> Find:
        usearch: Any = importlib.import_module("usearch.index")
        rows = given.rows
        scale = _LEVELS / float(np.abs(rows).max())
        index = usearch.Index(
            ndim=rows.shape[1],
            metric="l2sq",
            dtype="i8",
            connectivity=links,
            expansion_add=effort,
        )
        index.add(np.arange(rows.shape[0]), _int8(rows, scale), threads=given.threads)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            index.expansion_search = width
            count = min(width, _AGAIN * limit)
            found = index.search(_int8(queries, scale), count, threads=threads)
            candidates = np.asarray(found.keys, np.int64).reshape(queries.shape[0], count)
            return measured_again(rows, queries, candidates, limit)

        return find

    return make


def svs_i8(links: int, effort: int, limit: int) -> Callable[[Given], Find]:
    """Return the maker of SVS' Vamana graph over int8 rows; numpy refines.

    SVS has its own codes of 4 and 8 bits (LVQ), but ends the process where the CPU is not Intel's.
    """

    def make(given: Given) -> Find:
        rows = given.rows
        scale = _LEVELS / float(np.abs(rows).max())
        search = svs_vamana(_int8(rows, scale), links, effort, given.threads)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            count = min(width, _AGAIN * limit)
            candidates = search(_int8(queries, scale), count, width, threads)
            return measured_again(rows, queries, candidates, limit)

        return find

    return make


def svs_vamana(
    rows: NDArray[Any], links: int, effort: int, threads: int
) -> Callable[[NDArray[Any], int, int, int], Ids]:
    """Return SVS' search over a Vamana graph: of queries, a limit, a width and threads."""
    svs: Any = importlib.import_module("svs")
    index = svs.Vamana.build(
        svs.VamanaBuildParameters(graph_max_degree=2 * links, window_size=effort),
        rows,
        svs.DistanceType.L2,
        num_threads=threads,
    )

    def search(queries: NDArray[Any], limit: int, width: int, threads: int) -> Ids:
        index.num_threads = threads
        index.search_window_size = width
        return np.asarray(index.search(queries, limit)[0], np.int64)

    return search


def svs_is_installed() -> bool:
    """Whether SVS can be imported; its wheels are for x86 and have a licence of their own."""
    return importlib.util.find_spec("svs") is not None


def measured_again(rows: Rows, queries: Rows, candidates: Ids, limit: int) -> Ids:
    """Return the nearest candidates by their rows in fp32.

    Args:
        rows: (n, dimensions).
        queries: (q, dimensions).
        candidates: (q, c) rows.
        limit: rows of each query.

    Returns:
        (q, limit) rows.
    """
    nearest = np.empty((queries.shape[0], limit), np.int64)
    for begin in range(0, queries.shape[0], _QUERIES_AT_ONCE):
        part = slice(begin, begin + _QUERIES_AT_ONCE)
        apart = rows[candidates[part]] - queries[part, None]
        distances = np.einsum("qcd,qcd->qc", apart, apart)
        order = np.argsort(distances, axis=1, kind="stable")[:, :limit]
        nearest[part] = np.take_along_axis(candidates[part], order, 1)
    return nearest


def _int8(rows: Rows, scale: float) -> NDArray[np.int8]:
    return np.asarray(np.clip(np.rint(rows * scale), -_LEVELS, _LEVELS), np.int8)
