"""What the card's kernels find, held against the oracle and the CPU's.

Not collected by itself: ``test_ann_cuda.py`` runs it in a process where Triton interprets, which it
must know before it is imported. Where there is a card, it runs on that. Interpreted, an expansion
takes a tenth of a second: searches are few and narrow.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eval.pool import card_study, to_the_end
from eval.pool.cards import exact_search, graph_search
from ppd.ann import batch, oracle
from ppd.ann.cuda.backend import backend_on
from ppd.ann.cuda.lanes import CudaLaneSet
from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.growth import Growth
from ppd.ann.kernels import BLOCK
from ppd.ann.lanes import LaneSet, Target
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage
from ppd.ann.searches import Ending, Search, steps_of
from ppd.ann.snapshot import Precision, Shape, Snapshot
from ppd.ann.space import Metric, Rows

from .ann_fixtures import clustered, made, recall, target_of, truth, whole_numbers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = backend_on(DEVICE, 16)
Lanes = tuple[Target, LaneSet]
ROWS = clustered(1500, 48, 30, 0)
QUERIES = clustered(60, 48, 30, 0) + np.float32(0.05)


@pytest.fixture(scope="module")
def exact() -> Snapshot:
    """Sums are exact in any order, and no distance is given up before its end."""
    snapshot = whole_numbers(1500, 128, 1)
    snapshot.graph.reach[:] = 1.0
    return snapshot


def lanes_of(target: Target, lanes: int = 16) -> Lanes:
    return target, BACKEND.make(target.snapshot, lanes, 128)


def found(
    on: Lanes, queries: Rows, widths: list[int], limit: int, steps: int
) -> tuple[Rows, NDArray[np.int32]]:
    """All at once, ``steps`` at a time."""
    target, lanes = on
    limits = [min(limit, width) for width in widths]
    moved = target.snapshot.space.queries(queries)
    return to_the_end.run(lanes, moved, widths, steps, limits, target.hidden)


def test_it_finds_what_the_oracle_finds_at_every_width(exact: Snapshot) -> None:
    source = np.random.default_rng(2)
    queries = source.integers(-8, 9, size=(6, 128)).astype(np.float32)
    hidden = (source.random(1500) < 0.2).astype(np.uint8)
    lanes = lanes_of(Target(exact, hidden))
    widths = [1, 3, 10, 33, 65, 16]
    near, nodes = found(lanes, queries, widths, 10, 7)
    for i, query in enumerate(queries):
        wanted_near, wanted = oracle.search(exact, query, min(10, widths[i]), widths[i], hidden)
        assert nodes[i, : wanted.size].tolist() == wanted.tolist()
        assert near[i, : wanted.size].tolist() == wanted_near.tolist()
        assert (nodes[i, wanted.size : min(10, widths[i])] == -1).all()


def test_the_same_ids_and_bits_alone_and_among_others() -> None:
    target = target_of(made(ROWS, precision=Precision.INT8))
    widths = [8, 16, 24, 70]
    near, nodes = found(lanes_of(target), QUERIES[:4], widths, 8, 1000)
    alone = lanes_of(target, lanes=1)
    for i in range(4):
        again, ids = found(alone, QUERIES[i : i + 1], widths[i : i + 1], 8, 5)
        assert ids[0].tolist() == nodes[i].tolist()
        assert again.tobytes() == near[i : i + 1].tobytes()


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_finds_what_it_finds_on_the_cpu(precision: Precision) -> None:
    """But for who lies where distances are given up before their end, there."""
    target = target_of(made(ROWS, precision=precision))
    near, nodes = found(lanes_of(target), QUERIES[:4], [20] * 4, 10, 1000)
    near_there, there = batch.search(target, QUERIES[:4], 10, 20)
    assert recall(nodes, there.astype(np.int64)) > 0.95
    assert near[:, 0] == pytest.approx(near_there[:, 0], rel=1e-4, abs=1e-4)


def test_what_is_written_later_is_found_on_the_card_too() -> None:
    growth = Growth(made(ROWS[:800], precision=Precision.INT8), np.zeros(800, np.uint8))
    lanes = lanes_of(growth.target)
    assert found(lanes, ROWS[:2], [10] * 2, 1, 50)[1][:, 0].tolist() == [0, 1]
    growth.add(ROWS[800:830], np.arange(800, 830))
    assert growth.target is lanes[0], "there was room"
    asked = ROWS[[800, 815, 829]]
    assert found(lanes, asked, [10] * 3, 1, 50)[1][:, 0].tolist() == [800, 815, 829]
    growth.target.hidden[815] = 1
    left = found(lanes, asked, [10] * 3, 1, 50)[1][:, 0]
    assert left[[0, 2]].tolist() == [800, 829]
    assert left[1] != 815


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_handful_of_rows(count: int) -> None:
    target = target_of(made(ROWS[:count]))
    nodes = found(lanes_of(target), ROWS[:count], [16] * count, 10, 50)[1]
    for i in range(count):
        assert nodes[i, 0] == i
        assert sorted(nodes[i, :count].tolist()) == list(range(count))
        assert (nodes[i, count:] == -1).all()


def test_a_degree_that_is_no_power_of_two_and_wider_than_the_search() -> None:
    target = target_of(made(ROWS, shape=Shape(degree=72, knn=90, seeds=40)))
    nodes = found(lanes_of(target), QUERIES[:2], [12] * 2, 10, 20)[1]
    assert recall(nodes, truth(ROWS, QUERIES[:2], 10, Metric.L2)) > 0.8


def test_the_searches_that_are_compared_on_a_card_find_the_nearest() -> None:
    target = target_of(made(ROWS, precision=Precision.INT8))
    wanted = truth(ROWS, QUERIES[:3], 10, Metric.L2)
    for find in (graph_search(target, 10, DEVICE, most=2), exact_search(target, 10, DEVICE)):
        assert recall(find(QUERIES[:3], 24, 1).astype(np.int32), wanted) > 0.9


def test_the_rows_that_a_search_reads_are_counted() -> None:
    target = target_of(made(ROWS))
    lanes = BACKEND.make(target.snapshot, 2, 128)
    assert isinstance(lanes, CudaLaneSet)
    places = lanes.admit(target.snapshot.space.queries(QUERIES[:2]), [16] * 2)
    assert lanes.rows_read(places) == 0, "no neighbour is read before a step"
    done = lanes.advance(places, 1000, [10] * 2, [target.hidden] * 2).expansions
    assert 32 <= lanes.rows_read(places) <= 16 * done


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_the_study_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    plan = card_study.Plan(20_000, 128, 2048, None, 1, 0, 4)
    assert card_study.run(plan, out) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["ours_cuda_qps"] > 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"copy", "build", "rate", "curve", "single"} == {row["what"] for row in rows}


def test_an_engine_on_the_card_serves_two_targets_and_deadlines() -> None:
    snapshot = made(ROWS)
    assert snapshot.graph.codes.shape[1] == BLOCK
    hidden = (np.arange(1500) % 3 == 0).astype(np.uint8)
    targets = target_of(snapshot), Target(snapshot, hidden)
    now_s = 0.0
    pace = Pace()
    scheduler: Scheduler[Search] = Scheduler(Bounds(), Controls(), lambda: pace.expansion_s)
    engine = Engine(scheduler, pace, lambda: now_s, StepShape(8, 40), BACKEND, 128)
    searches = [
        Search(
            list(Stage)[i % 2],
            0.0,
            math.inf if i else 1.0,
            steps_of(10 if i else 60),
            target=targets[i % 2],
            query=snapshot.space.queries(QUERIES[i : i + 1]),
            itopk=10 if i else 60,
            limit=5,
        )
        for i in range(12)
    ]
    scheduler.offer_all(searches)
    ended = engine.step(*engine.choose(now_s))
    now_s = 2.0
    while len(ended) < 12:
        chosen, late = engine.choose(now_s)
        assert chosen or late, "a search is lost"
        ended += engine.step(chosen, late)
    endings = {id(one.search): one for one in ended}
    assert [endings[id(one)].ending for one in searches].count(Ending.DEADLINE) == 1
    for i, one in enumerate(searches[1:], 1):
        nodes = found(lanes_of(targets[i % 2], lanes=1), QUERIES[i : i + 1], [10], 5, 1000)[1]
        assert endings[id(one)].nodes.tolist() == nodes[0].tolist()
