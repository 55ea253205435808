"""Vector indexes that the pool's is compared with, and the pool's own, behind one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import hnswlib
import numpy as np
from numpy.typing import NDArray
from usearch.index import Index as UsearchIndex

from ppd.ann.batch import Searcher
from ppd.ann.lanes import Target
from ppd.ann.searches import MAX_ITOPK
from ppd.ann.snapshot import Precision, Snapshot, seed_rows
from ppd.ann.space import Rows

from . import rivals_int8
from .given import Given

Ids = NDArray[np.int64]
Find = Callable[[Rows, int, int], Ids]

LIMIT = 10
LINKS, EFFORT = 16, 200  # M and efConstruction, alike for all HNSW
SWEPT = ((16, 400), (32, 200), (32, 400))  # others, for the best two of them


@dataclass(frozen=True, slots=True)
class Index:
    """One index under test.

    Attributes:
        find: (queries, width of the search, threads) to ids, (n, LIMIT).
    """

    name: str
    find: Find


def make(name: str, given: Given) -> Index:
    """Return the index of one of the names of ``ALL``."""
    return Index(name, (_MAKERS | _SWEPT)[name](given))


def _ours(precision: Precision) -> Callable[[Given], Find]:
    def make(given: Given) -> Find:
        target = given.target
        if precision is Precision.FP32:
            target = Target(_in_fp32(target.snapshot), target.hidden)
        searchers = {each: Searcher(target, MAX_ITOPK, threads=each) for each in {1, given.threads}}

        def find(queries: Rows, width: int, threads: int) -> Ids:
            return searchers[threads].search(queries, LIMIT, width)[1].astype(np.int64)

        return find

    return make


def _in_fp32(snapshot: Snapshot) -> Snapshot:
    """The same graph, followed by whole rows."""
    rows, seeds = snapshot.exact, snapshot.graph.seed_ids
    graph = snapshot.graph._replace(codes=rows, seed_rows=seed_rows(rows, seeds, 1.0))
    nothing = np.empty((0, 0), np.float32)
    return Snapshot(snapshot.space, Precision.FP32, 1.0, graph, nothing, snapshot.keys)


def _hnswlib(links: int = LINKS, effort: int = EFFORT) -> Callable[[Given], Find]:
    def make(given: Given) -> Find:
        rows, threads = given.rows, given.threads
        index = hnswlib.Index("l2", rows.shape[1])
        index.init_index(rows.shape[0], M=links, ef_construction=effort, random_seed=0)
        index.add_items(rows, num_threads=threads)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            index.set_ef(width)
            return np.asarray(index.knn_query(queries, LIMIT, num_threads=threads)[0], np.int64)

        return find

    return make


def _faiss_hnsw(links: int = LINKS, effort: int = EFFORT) -> Callable[[Given], Find]:
    def make(given: Given) -> Find:
        rows, threads = given.rows, given.threads
        faiss.omp_set_num_threads(threads)
        index = faiss.IndexHNSWFlat(rows.shape[1], links)
        index.hnsw.efConstruction = effort
        index.add(rows)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            faiss.omp_set_num_threads(threads)
            index.hnsw.efSearch = width
            return np.asarray(index.search(queries, LIMIT)[1], np.int64)

        return find

    return make


def _faiss_nsg(given: Given) -> Find:
    rows, threads = given.rows, given.threads
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexNSGFlat(rows.shape[1], 2 * LINKS)
    index.build_type = 1  # NN-descent, as ours
    index.add(rows)

    def find(queries: Rows, width: int, threads: int) -> Ids:
        faiss.omp_set_num_threads(threads)
        index.nsg.search_L = width
        return np.asarray(index.search(queries, LIMIT)[1], np.int64)

    return find


def _usearch(dtype: str) -> Callable[[Given], Find]:
    def make(given: Given) -> Find:
        rows = given.rows
        index = UsearchIndex(
            ndim=rows.shape[1],
            metric="l2sq",
            dtype=dtype,
            connectivity=LINKS,
            expansion_add=EFFORT,
        )
        index.add(np.arange(rows.shape[0]), rows, threads=given.threads)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            index.expansion_search = width
            found = index.search(queries, LIMIT, threads=threads)
            return np.asarray(found.keys, np.int64).reshape(queries.shape[0], LIMIT)

        return find

    return make


def _svs(given: Given) -> Find:
    search = rivals_int8.svs_vamana(given.rows, LINKS, EFFORT, given.threads)
    return lambda queries, width, threads: search(queries, LIMIT, width, threads)


_MAKERS: dict[str, Callable[[Given], Find]] = {
    "ours": _ours(Precision.INT8),
    "ours_fp32": _ours(Precision.FP32),
    "hnswlib": _hnswlib(),
    "faiss_hnsw": _faiss_hnsw(),
    "faiss_nsg": _faiss_nsg,
    "usearch": _usearch("f32"),
    "usearch_f16": _usearch("f16"),
    "faiss_hnsw_sq": rivals_int8.faiss_hnsw_sq(LINKS, EFFORT, LIMIT),
    "usearch_i8": rivals_int8.usearch_i8(LINKS, EFFORT, LIMIT),
}
if rivals_int8.svs_is_installed():
    _MAKERS["svs"] = _svs
    _MAKERS["svs_i8"] = rivals_int8.svs_i8(LINKS, EFFORT, LIMIT)
_SWEPT = {f"hnswlib_{m}_{ef}": _hnswlib(m, ef) for m, ef in SWEPT} | {
    f"faiss_hnsw_sq_{m}_{ef}": rivals_int8.faiss_hnsw_sq(m, ef, LIMIT) for m, ef in SWEPT
}
NAMES, SWEPT_NAMES = tuple(_MAKERS), tuple(_SWEPT)
ALL = (*NAMES, *SWEPT_NAMES)
