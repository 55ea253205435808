"""What the pool's benchmark does: drawn histories, three ways to run them, real sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.pool import ideal, queueing, sentences
from eval.pool.bursts import BATCH, BATCH_WAIT_S, KINDS, Arrival, Way, draw, run
from ppd.ann import batch
from ppd.ann.schedule import Stage
from ppd.errors import ConfigError

from .ann_fixtures import clustered, made, target_of

ROWS = clustered(1500, 32, 20, 0)


def test_histories_have_the_rate_asked_for_and_bursts_five_times_as_dense() -> None:
    arrivals = draw(1000.0, 60.0, 100, 0)
    assert len(arrivals) == pytest.approx(60_000, rel=0.05)
    in_bursts = sum(one.at_s % 0.5 >= 0.45 for one in arrivals)
    assert in_bursts * 0.45 / 0.05 == pytest.approx(5 * (len(arrivals) - in_bursts), rel=0.1)
    assert arrivals == draw(1000.0, 60.0, 100, 0)


@pytest.mark.parametrize("way", list(Way))
def test_every_way_answers_all_with_the_same_ids(way: Way) -> None:
    target = target_of(made(ROWS))
    queries = ROWS[:50] + 0.1
    arrivals = draw(3000.0, 0.2, 50, 1)
    answered = run(way, target, target.snapshot.space.queries(queries), arrivals, 2)
    assert len(answered) == len(arrivals)
    for one in answered:
        query = queries[one.query : one.query + 1]
        _, nodes = batch.search(target, query, len(one.nodes), one.itopk)
        assert one.nodes == tuple(nodes[0].tolist())
        assert one.took_s > 0


def test_without_a_queue_a_search_takes_what_it_costs_and_with_one_it_waits() -> None:
    taken = {(32, 10): 0.001, (128, 10): 0.004}

    def at(*times_s: float) -> list[Arrival]:
        return [Arrival(one, Stage.PREFILL, 0, 32, 10) for one in times_s]

    apart = ideal.p99_us(at(0.0, 0.5, 1.0), taken, 1, Stage.PREFILL)
    assert apart == pytest.approx(1000.0)
    together = at(*[0.0] * 4)
    assert ideal.p99_us(together, taken, 1, Stage.PREFILL) == pytest.approx(4000.0, rel=0.01)
    assert ideal.p99_us(together, taken, 2, Stage.PREFILL) == pytest.approx(2000.0, rel=0.01)
    behind = [Arrival(0.0, Stage.DECODE, 0, 128, 10), *at(0.001)]
    assert ideal.p99_us(behind, taken, 1, Stage.PREFILL) == pytest.approx(4000.0)


def test_in_simulated_time_a_search_alone_takes_what_it_costs_and_a_batch_as_long_as_all() -> None:
    costs = queueing.Costs(1e-6, 1e-6, 1e-6, step=100e-6, search=10e-6, alone=50e-6)
    narrow, wide = costs.compiled(32), costs.compiled(256)
    apart = [Arrival(at_s, Stage.DECODE, 0, 32, 10) for at_s in (0.0, 0.5, 1.0)]
    took = queueing.ours(apart, costs)[Stage.DECODE]
    assert took == pytest.approx([100e-6 + 10e-6 + narrow] * 3)
    assert queueing.fifo(apart, costs)[Stage.DECODE] == pytest.approx([50e-6 + narrow] * 3)
    waits = BATCH_WAIT_S + 100e-6 + 10e-6 + narrow
    assert queueing.fixed(apart, costs)[Stage.DECODE] == pytest.approx([waits] * 3)

    full = [Arrival(0.0, Stage.PREFILL, 0, 32, 10)] * (BATCH - 1)
    full.append(Arrival(0.0, Stage.DECODE, 0, 256, 10))
    waits = 100e-6 + BATCH * 10e-6 + (BATCH - 1) * narrow + wide
    assert queueing.fixed(full, costs)[Stage.PREFILL] == pytest.approx([waits] * (BATCH - 1))
    assert max(queueing.ours(full, costs)[Stage.PREFILL]) < waits  # they leave as they finish


def test_in_simulated_time_all_are_answered_at_the_given_cost_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queueing.run([0.3], 1, tmp_path / "rows.jsonl", seconds=2.0) == 0
    told = json.loads(capsys.readouterr().out)["load0.3"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 7
    assert told["ours_without_python_decode_p99_us"] < told["ours_decode_p99_us"]
    arrivals = draw(1000.0, 1.0, 1, 0)
    for way in (queueing.ours, queueing.fifo, queueing.fixed):
        assert sum(map(len, way(arrivals, queueing.Costs()).values())) == len(arrivals)


def test_costs_are_of_every_kind_that_is_drawn() -> None:
    target = target_of(made(ROWS))
    taken = ideal.costs(target, target.snapshot.space.queries(ROWS[:20]), 2)
    assert taken.keys() == {kind for kinds in KINDS.values() for kind in kinds}
    assert min(taken.values()) > 0


def test_sentences_come_from_files_first(tmp_path: Path) -> None:
    said = [f"This is the sentence with number {'x' * i} in it." for i in range(1, 8)]
    talk = {"messages": [{"role": "user", "content": " ".join(said)}, {"content": None}]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk))
    found, documented = sentences.collect([tmp_path / "talk.jsonl"], 7, 0)
    assert sorted(found) == sorted(said)
    assert documented == 0
    found, documented = sentences.collect([tmp_path / "talk.jsonl"], 30, 0)
    assert documented == 23
    assert set(said) < set(found)
    with pytest.raises(ConfigError, match=r"absent"):
        sentences.collect([tmp_path / "absent.txt"], 1, 0)
