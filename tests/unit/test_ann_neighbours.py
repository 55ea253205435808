"""Who finds each row's neighbours, and what becomes of what he found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from ppd.ann import batch
from ppd.ann.neighbours import Finder, nearest_neighbours
from ppd.ann.snapshot import Precision, Shape, build
from ppd.ann.space import Metric
from ppd.errors import ConfigError, IndexFileError

from .ann_fixtures import clustered, recall, target_of, truth

ROWS = clustered(9000, 16, 40, 0)  # too many to compare with all others


class Card:
    """cuVS as far as we use it: exact, ids without a sign, each row its own first neighbour."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.fails = ""
        self.spoil: Callable[[Any], None] = lambda graph: None

    def build(self, params: dict[str, Any], rows: Any) -> Any:
        if self.fails:
            raise RuntimeError(self.fails)
        assert rows.dtype == np.float32
        assert rows.flags.c_contiguous
        self.params = params
        _, ids = faiss.knn(rows, rows, params["graph_degree"])
        graph = ids.astype(np.uint32)
        self.spoil(graph)
        return SimpleNamespace(graph=graph)


class Neighbors(ModuleType):
    nn_descent: Any


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    cuvs, neighbors = ModuleType("cuvs"), Neighbors("cuvs.neighbors")
    neighbors.nn_descent = SimpleNamespace(IndexParams=dict, build=card.build)
    cuvs.__spec__ = neighbors.__spec__ = sys.__spec__  # it is there, for whoever looks
    monkeypatch.setitem(sys.modules, "cuvs", cuvs)
    monkeypatch.setitem(sys.modules, "cuvs.neighbors", neighbors)
    return card


@pytest.mark.parametrize("finder", [Finder.AUTO, Finder.CUVS])
def test_what_the_card_found_is_taken(card: Card, finder: Finder) -> None:
    found = nearest_neighbours(ROWS, 8, 2, finder)
    assert card.params["graph_degree"] == 9
    assert found.dtype == np.int32
    assert found.shape == (9000, 8)
    assert not (found == np.arange(9000)[:, None]).any()
    assert (found[:50] == truth(ROWS, ROWS[:50], 9, Metric.L2)[:, 1:]).mean() > 0.99


def test_an_index_of_the_cards_neighbours_finds(card: Card) -> None:
    keys = np.arange(9000, dtype=np.int64)
    shape = Shape(degree=16, knn=32)
    made = build(
        ROWS, keys, Metric.L2, Precision.INT8, shape, threads=2, seed=0, finder=Finder.AUTO
    )
    assert card.params["graph_degree"] == 33
    queries = ROWS[:100] + np.float32(0.05)
    _, nodes = batch.search(target_of(made), queries, 10, 64)
    assert recall(nodes, truth(ROWS, queries, 10, Metric.L2)) > 0.97


def test_faiss_is_taken_when_asked_for(card: Card) -> None:
    found = nearest_neighbours(ROWS, 8, 2, Finder.FAISS)
    assert (found.shape, card.params) == ((9000, 8), {})


def test_a_failed_gpu_is_reported(card: Card) -> None:
    card.fails = "out of memory"
    with pytest.raises(IndexFileError, match="cuVS: out of memory; faiss finds"):
        nearest_neighbours(ROWS, 8, 2, Finder.CUVS)
    assert nearest_neighbours(ROWS, 8, 2, Finder.AUTO).shape == (9000, 8)  # by faiss


def test_a_graph_with_a_row_twice_or_with_holes_is_no_trap(card: Card) -> None:
    def change(graph: Any) -> None:
        graph[5, :] = 5

    card.spoil = change
    found = nearest_neighbours(ROWS, 8, 2, Finder.CUVS)
    assert found.shape == (9000, 8)

    def hole(graph: Any) -> None:
        graph[7, 3] = 2**32 - 1

    card.spoil = hole
    with pytest.raises(IndexFileError, match="places that nothing was found for"):
        nearest_neighbours(ROWS, 8, 2, Finder.CUVS)


def test_without_cuvs_it_is_named_or_faiss_taken() -> None:
    with pytest.raises(ConfigError, match=r"cuVS cannot be loaded .*pip install cuvs-cu13"):
        nearest_neighbours(ROWS, 8, 2, Finder.CUVS)
    assert nearest_neighbours(ROWS, 8, 2, Finder.AUTO).shape == (9000, 8)
