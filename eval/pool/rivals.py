"""Vector indexes that the pool's is compared with, and the pool's own, behind one call.

Where there is a card, two that run on it are among them (``cards.py``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import faiss
import hnswlib
import numpy as np
from numpy.typing import NDArray
from usearch.index import Index as UsearchIndex

from ppd.ann.batch import Searcher
from ppd.ann.engine import MOST_ITOPK
from ppd.ann.lanes import Target
from ppd.ann.snapshot import Precision, Shape, build
from ppd.ann.space import Metric, Rows

Ids = NDArray[np.int64]
Find = Callable[[Rows, int, int], Ids]

LIMIT = 10
_LINKS, _EFFORT = 16, 200  # M and efConstruction, alike for all HNSW


@dataclass(frozen=True, slots=True)
class Index:
    """
    Attributes:
        find: (queries, width of the search, threads) to ids, (n, LIMIT).
    """

    name: str
    find: Find


def make(name: str, rows: Rows, threads: int) -> Index:
    """One of ``NAMES``, over rows that are compared by squared distance."""
    return Index(name, (_MAKERS | _ON_CARD)[name](rows, threads))


def ours_target(rows: Rows, precision: Precision, threads: int) -> Target:
    keys = np.arange(rows.shape[0], dtype=np.int64)
    snapshot = build(rows, keys, Metric.L2, precision, Shape(), threads=threads, seed=0)
    return Target(snapshot, np.zeros(rows.shape[0], np.uint8))


def _ours(precision: Precision) -> Callable[[Rows, int], Find]:
    def make(rows: Rows, threads: int) -> Find:
        target = ours_target(rows, precision, threads)
        searchers = {each: Searcher(target, MOST_ITOPK, threads=each) for each in {1, threads}}

        def find(queries: Rows, width: int, threads: int) -> Ids:
            return searchers[threads].search(queries, LIMIT, width)[1].astype(np.int64)

        return find

    return make


def _hnswlib(rows: Rows, threads: int) -> Find:
    index = hnswlib.Index("l2", rows.shape[1])
    index.init_index(rows.shape[0], M=_LINKS, ef_construction=_EFFORT, random_seed=0)
    index.add_items(rows, num_threads=threads)

    def find(queries: Rows, width: int, threads: int) -> Ids:
        index.set_ef(width)
        return np.asarray(index.knn_query(queries, LIMIT, num_threads=threads)[0], np.int64)

    return find


def _faiss_hnsw(rows: Rows, threads: int) -> Find:
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexHNSWFlat(rows.shape[1], _LINKS)
    index.hnsw.efConstruction = _EFFORT
    index.add(rows)

    def find(queries: Rows, width: int, threads: int) -> Ids:
        faiss.omp_set_num_threads(threads)
        index.hnsw.efSearch = width
        return np.asarray(index.search(queries, LIMIT)[1], np.int64)

    return find


def _faiss_nsg(rows: Rows, threads: int) -> Find:
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexNSGFlat(rows.shape[1], 2 * _LINKS)
    index.build_type = 1  # NN-descent, as ours
    index.add(rows)

    def find(queries: Rows, width: int, threads: int) -> Ids:
        faiss.omp_set_num_threads(threads)
        index.nsg.search_L = width
        return np.asarray(index.search(queries, LIMIT)[1], np.int64)

    return find


def _usearch(dtype: str) -> Callable[[Rows, int], Find]:
    def make(rows: Rows, threads: int) -> Find:
        index = UsearchIndex(
            ndim=rows.shape[1],
            metric="l2sq",
            dtype=dtype,
            connectivity=_LINKS,
            expansion_add=_EFFORT,
        )
        index.add(np.arange(rows.shape[0]), rows, threads=threads)

        def find(queries: Rows, width: int, threads: int) -> Ids:
            index.expansion_search = width
            found = index.search(queries, LIMIT, threads=threads)
            return np.asarray(found.keys, np.int64).reshape(queries.shape[0], LIMIT)

        return find

    return make


_MAKERS: dict[str, Callable[[Rows, int], Find]] = {
    "ours": _ours(Precision.INT8),  # what ppd-pool build makes unless told otherwise
    "ours_fp32": _ours(Precision.FP32),
    "hnswlib": _hnswlib,
    "faiss_hnsw": _faiss_hnsw,
    "faiss_nsg": _faiss_nsg,
    "usearch": _usearch("f32"),
    "usearch_f16": _usearch("f16"),
}


def _on_card() -> dict[str, Callable[[Rows, int], Find]]:
    if not all(map(importlib.util.find_spec, ("torch", "triton"))):
        return {}
    import torch

    from . import cards

    def ours(rows: Rows, threads: int) -> Find:
        return cards.graph_search(ours_target(rows, Precision.INT8, threads), LIMIT, device)

    def exact(rows: Rows, threads: int) -> Find:
        return cards.exact_search(ours_target(rows, Precision.INT8, threads), LIMIT, device)

    device = torch.device("cuda")
    return {"ours_cuda": ours, "exact_cuda": exact} if torch.cuda.is_available() else {}


_ON_CARD = _on_card()
ON_CARD = tuple(_ON_CARD)
NAMES = (*_MAKERS, *ON_CARD)
