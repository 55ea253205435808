"""The search itself: what it finds, and that nobody beside it changes that."""

from __future__ import annotations

import numpy as np
import pytest

from ppd.ann import batch, oracle
from ppd.ann.graph import reachable
from ppd.ann.growth import Growth
from ppd.ann.lanes import Target
from ppd.ann.snapshot import Precision, Shape, Snapshot, choose_seeds, default_seeds
from ppd.ann.space import Metric, Rows
from ppd.errors import RequestError

from .ann_fixtures import clustered, made, recall, target_of, truth, whole_numbers

ROWS = clustered(6000, 48, 60, 0)
QUERIES = clustered(2000, 48, 60, 0) + np.float32(0.05)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return made(ROWS)


@pytest.fixture(scope="module")
def exact() -> Snapshot:
    return whole_numbers(1500, 64, 1)


def test_the_same_ids_and_bits_alone_and_among_two_thousand(snapshot: Snapshot) -> None:
    target = target_of(snapshot)
    near, nodes = batch.search(target, QUERIES, 10, 32, lanes=64, threads=2)
    for i in range(0, 2000, 7):
        near_alone, alone = batch.search(target, QUERIES[i : i + 1], 10, 32, lanes=1)
        assert alone.tolist() == nodes[i : i + 1].tolist()
        assert near_alone.tobytes() == near[i : i + 1].tobytes()


@pytest.mark.parametrize("itopk", [1, 10, 33, 100])
def test_it_finds_what_the_oracle_finds(exact: Snapshot, itopk: int) -> None:
    source = np.random.default_rng(2)
    queries = source.integers(-8, 9, size=(40, 64)).astype(np.float32)
    hidden = (source.random(1500) < 0.2).astype(np.uint8)
    limit = min(10, itopk)
    near, nodes = batch.search(Target(exact, hidden), queries, limit, itopk)
    for i, query in enumerate(queries):
        wanted_near, wanted = oracle.search(exact, query, limit, itopk, hidden)
        assert nodes[i, : wanted.size].tolist() == wanted.tolist()
        assert near[i, : wanted.size].tolist() == wanted_near.tolist()
        assert (nodes[i, wanted.size :] == -1).all()


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("metric", list(Metric))
def test_recall_in_every_metric_and_precision(metric: Metric, precision: Precision) -> None:
    rows, queries = ROWS[:2500], QUERIES[:100]
    target = target_of(made(rows, metric, precision))
    near, nodes = batch.search(target, queries, 10, 64)
    assert recall(nodes, truth(rows, queries, 10, metric)) > 0.97
    scores = target.snapshot.space.scores(queries, near)[0]
    first = rows[nodes[0, 0]]
    match metric:
        case Metric.L2:
            expected = ((queries[0] - first) ** 2).sum()
        case Metric.IP:
            expected = queries[0] @ first
        case Metric.COSINE:
            expected = queries[0] @ first / np.linalg.norm(queries[0]) / np.linalg.norm(first)
    assert scores[0] == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_every_row_can_be_reached_in_clusters_without_edges_between() -> None:
    rows = clustered(9000, 32, 300, 3) * np.float32(20.0)
    snapshot = made(rows, shape=Shape(degree=8, knn=16, seeds=300))
    assert reachable(snapshot.graph.neighbours, snapshot.graph.seed_ids).mean() > 0.999
    _, nodes = batch.search(target_of(snapshot), rows[:500], 1, 32)
    assert (nodes[:, 0] == np.arange(500)).mean() > 0.99


def test_one_row_of_another_size_does_not_blur_the_others() -> None:
    rows = ROWS[:2500].copy()
    rows[7] *= np.float32(300)
    _, nodes = batch.search(target_of(made(rows, precision=Precision.INT8)), QUERIES[:100], 10, 64)
    assert recall(nodes, truth(rows, QUERIES[:100], 10, Metric.L2)) > 0.97
    _, own = batch.search(target_of(made(rows, precision=Precision.INT8)), rows[7:8], 1, 64)
    assert own[0, 0] == 7


def test_what_is_hidden_is_not_found_and_others_are(snapshot: Snapshot) -> None:
    hidden = (np.random.default_rng(4).random(6000) < 0.5).astype(np.uint8)
    _, nodes = batch.search(Target(snapshot, hidden), QUERIES[:200], 10, 96)
    assert not hidden[nodes[nodes >= 0]].any()
    left = np.flatnonzero(hidden == 0)
    wanted = left[truth(ROWS[left], QUERIES[:200], 10, Metric.L2)]
    assert recall(nodes, wanted) > 0.97


def test_added_rows_are_found_as_if_they_had_been_there() -> None:
    growth = Growth(made(ROWS[:3000]), np.zeros(3000, np.uint8))
    growth.add(ROWS[3000:4500], np.arange(3000, 4500))
    assert growth.count == 4500
    _, nodes = batch.search(growth.target, QUERIES[:300], 10, 64)
    assert recall(nodes, truth(ROWS[:4500], QUERIES[:300], 10, Metric.L2)) > 0.97
    _, own = batch.search(growth.target, ROWS[3000:4500], 1, 64)
    assert (own[:, 0] == np.arange(3000, 4500)).mean() > 0.99


def crowd(source: np.random.Generator, centre: Rows, count: int) -> Rows:
    rows = centre + 0.05 * source.normal(size=(count, centre.size)).astype(np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


@pytest.mark.parametrize("precision", list(Precision))
def test_a_new_topic_is_still_found_when_the_old_ones_have_grown(precision: Precision) -> None:
    """All that led to it was one edge, and shorter ones come for its place."""
    source = np.random.default_rng(6)
    centres = source.normal(size=(11, 64)).astype(np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    old = np.concatenate([crowd(source, centre, 80) for centre in centres[:10]])
    new = crowd(source, centres[10], 150)
    growth = Growth(made(old, precision=precision), np.zeros(800, np.uint8))
    growth.add(new, np.arange(800, 950))
    for start in range(950, 2950, 50):
        more = np.concatenate([crowd(source, centre, 5) for centre in centres[:10]])
        growth.add(more, np.arange(start, start + 50))
        graph = growth.target.snapshot.graph
        assert reachable(graph.neighbours[: growth.count], graph.seed_ids).all()
    _, found = batch.search(growth.target, new, 1, 64)
    assert (found[:, 0] == np.arange(800, 950)).mean() > 0.98


def test_many_rows_of_no_topic_are_all_found() -> None:
    """More than one node's second half has places for."""
    source = np.random.default_rng(7)
    crowded = crowd(source, np.full(64, 0.125, np.float32), 100)
    alone = source.normal(size=(1500, 64)).astype(np.float32) * 3
    growth = Growth(made(crowded), np.zeros(100, np.uint8))
    growth.add(alone, np.arange(100, 1600))
    graph = growth.target.snapshot.graph
    assert reachable(graph.neighbours[: growth.count], graph.seed_ids).all()


def test_a_row_longer_than_the_inner_product_space_allows_is_refused() -> None:
    growth = Growth(made(ROWS[:500], Metric.IP), np.zeros(500, np.uint8))
    with pytest.raises(RequestError, match="none longer"):
        growth.add(ROWS[:1] * np.float32(100), np.array([500]))
    assert growth.count == 500


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_handful_of_rows(count: int) -> None:
    target = target_of(made(ROWS[:count]))
    _, nodes = batch.search(target, ROWS[:count], 10, 16)
    for i in range(count):
        assert nodes[i, 0] == i
        assert sorted(nodes[i, :count].tolist()) == list(range(count))
        assert (nodes[i, count:] == -1).all()


def test_equal_rows_are_all_found() -> None:
    rows = np.repeat(ROWS[:20], 40, axis=0)
    _, nodes = batch.search(target_of(made(rows)), ROWS[:20], 10, 64)
    assert (nodes // 40 == np.arange(20)[:, None]).all()


def test_each_cluster_has_a_seed() -> None:
    """Also where there are more clusters than the root of the rows."""
    source = np.random.default_rng(0)
    rows, clusters = 10_000, 300
    assert rows**0.5 < clusters < default_seeds(rows)
    cluster = source.permutation(np.arange(rows) % clusters)
    centres = 10.0 * source.normal(size=(clusters, 16))
    spread = source.normal(size=(rows, 16))
    moved = (centres[cluster] + spread).astype(np.float32)
    seeds = choose_seeds(moved, default_seeds(rows), seed=0)
    assert len(set(cluster[seeds])) == clusters
    assert [default_seeds(rows) for rows in (1, 10**6, 10**9)] == [256, 4000, 8192]
