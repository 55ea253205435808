"""What the pool's benchmark does: drawn histories, every way to run them, real sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.pool import control_study, huge_pages, ideal, queueing, queueing_study, sentences
from eval.pool.arrivals import KINDS, Arrival, draw
from eval.pool.burst_rounds import Rounds
from eval.pool.bursts import run
from eval.pool.given import Sample
from eval.pool.orders import BATCH, BATCH_WAIT_S, Way
from eval.pool.stopwatch import Stopwatch
from ppd.ann import batch
from ppd.ann.engine import StepShape
from ppd.ann.schedule import MAX_RESERVED, Stage
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
    served = run(way, target, target.snapshot.space.queries(queries), arrivals, 2)
    assert len(served.answered) == served.waits().count() == len(arrivals)
    assert served.scheduling_us > served.choosing_us > 0
    assert all(one.at_s > one.arrived_s >= 0 for one in served.ended)
    for one in served.answered:
        query = queries[one.query : one.query + 1]
        _, nodes = batch.search(target, query, len(one.nodes), one.itopk)
        assert one.nodes == tuple(nodes[0].tolist())


def test_without_a_queue_a_search_takes_what_it_costs_and_with_one_it_waits() -> None:
    taken = {(32, 10): 0.001, (128, 10): 0.004}

    def at(*times_s: float) -> list[Arrival]:
        return [Arrival(one, Stage.PREFILL, 0, 32, 10) for one in times_s]

    def waits(arrivals: list[Arrival], cores: int) -> list[float]:
        return ideal.waits(arrivals, taken, cores).of[Stage.PREFILL]

    assert waits(at(0.0, 0.5, 1.0), 1) == pytest.approx([0.001] * 3)
    together = at(*[0.0] * 4)
    assert waits(together, 1) == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert waits(together, 2) == pytest.approx([0.001, 0.001, 0.002, 0.002])
    behind = [Arrival(0.0, Stage.DECODE, 0, 128, 10), *at(0.001)]
    assert waits(behind, 1) == pytest.approx([0.004])


COSTS = queueing.Costs(
    expansion=1e-6,
    enter=1e-6,
    kept=1e-6,
    together=0.5,
    step=60e-6,
    search=10e-6,
    whole=5e-6,
    batch=100e-6,
    batched=4e-6,
    alone=50e-6,
)


def took(way: Way, arrivals: list[Arrival], stage: Stage) -> list[float]:
    return queueing.serve(way, arrivals, COSTS).waits.of[stage]


def test_in_simulated_time_a_search_alone_takes_what_it_costs() -> None:
    narrow = COSTS.compiled(32)
    apart = [Arrival(at_s, Stage.DECODE, 0, 32, 10) for at_s in (0.0, 0.5, 1.0)]
    costs_s = dict.fromkeys(Way, 5e-05 + narrow) | {
        Way.OURS: 60e-6 + 5e-6 + narrow,
        Way.FIXED: BATCH_WAIT_S + 50e-6 + narrow,
    }
    for way, cost_s in costs_s.items():
        assert took(way, apart, Stage.DECODE) == pytest.approx([cost_s] * 3)


def test_in_simulated_time_a_batch_takes_as_long_as_all_of_it() -> None:
    narrow, wide = COSTS.compiled(32, BATCH), COSTS.compiled(256, BATCH)
    full = [Arrival(0.0, Stage.PREFILL, 0, 32, 10)] * (BATCH - 1)
    full.append(Arrival(0.0, Stage.DECODE, 0, 256, 10))
    waits = 100e-6 + BATCH * 4e-6 + (BATCH - 1) * narrow + wide
    assert took(Way.FIXED, full, Stage.PREFILL) == pytest.approx([waits] * (BATCH - 1))
    assert max(took(Way.OURS, full, Stage.PREFILL)) < waits  # without decode's
    of_prefill = 100e-6 + (BATCH - 1) * (4e-6 + narrow)
    assert took(Way.TWO_BATCHERS, full, Stage.PREFILL) == pytest.approx([of_prefill] * (BATCH - 1))


def test_in_simulated_time_pythons_time_is_counted_and_all_are_answered() -> None:
    arrivals = draw(1000.0, 1.0, 1, 0)
    for way in Way:
        served = queueing.serve(way, arrivals, COSTS)
        assert served.waits.count() == len(arrivals)
        if way in (Way.FIFO, Way.EDF, Way.PREFILL_FIRST):
            assert served.scheduling_us() == pytest.approx(50.0)
        assert queueing.serve(way, arrivals, COSTS.with_python(0.0)).scheduling_us() == 0.0


def test_the_study_has_a_row_for_each_way_and_each_share_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queueing_study.run([0.3], 1, tmp_path / "rows.jsonl", seconds=2.0) == 0
    told = json.loads(capsys.readouterr().out)["load0.3"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    kinds = {(row["way"], row["python_share"], row["wider"]) for row in rows}
    assert len(kinds) == len(rows) == (3 + 2) * (len(Way) + 1)
    by_share = {
        row["python_share"]: row["decode_p99_us"]
        for row in rows
        if (row["way"], row["wider"]) == ("ours", 1)
    }
    assert (
        by_share[0.0]
        < by_share[0.5]
        < by_share[1.0]
        == pytest.approx(told["ours_decode_p99_us"], abs=1e-3)
    )


def test_a_long_search_is_divided_and_prefill_need_not_wait_for_its_end() -> None:
    long = Arrival(0.0, Stage.DECODE, 0, 1024, 10)
    late = Arrival(1e-5, Stage.PREFILL, 0, 32, 10)
    both_cores = [long, long, late]
    whole = queueing.Ours(shape=StepShape(each=10_000))
    waits = {
        name: queueing.serve(Way.OURS, both_cores, COSTS, variant).waits.of
        for name, variant in (("divided", queueing.Ours()), ("whole", whole))
    }
    assert max(waits["divided"][Stage.PREFILL]) < 0.5 * max(waits["whole"][Stage.PREFILL])
    assert max(waits["divided"][Stage.DECODE]) > max(waits["whole"][Stage.DECODE])


def test_the_control_study_has_a_row_for_each_way_and_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = (
        control_study.Phase("quiet", 0.2, 0.3, seconds=1.0),
        control_study.Phase("full link", 0.5, 0.4, link=1.2, seconds=8.0),
    )
    assert control_study.simulate(1, tmp_path / "rows.jsonl", phases) == 0
    p95s = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len({(row["way"], row["phase"]) for row in rows}) == len(rows) == 2 * len(p95s)
    share = {(row["way"], row["phase"]): row["reserved"] for row in rows}
    assert share["fixed at 0.5", "full link"] == 0.5
    assert share["loop", "full link"] < share["loop", "quiet"] == MAX_RESERVED
    name = "full link: decode_p95_ms"
    assert p95s["loop"][name] < 0.9 * p95s["fixed at 0.9"][name]
    name = "full link: kv_there_p95_ms"
    assert p95s["loop"][name] < 1.01 * p95s["fixed at 0.9"][name]


def test_the_measured_control_study_serves_all_phases_over_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "ensure", lambda: None)  # it starts the process anew
    monkeypatch.setattr(Sample, "embedded", lambda _: (ROWS, ROWS[:50] + 0.1, {}))
    sample = Sample((), 0, None, 0, 0, tmp_path)
    phases = (control_study.Phase("quiet", 0.1, 0.1, seconds=0.6),)
    assert control_study.measure(sample, 1, 2, tmp_path / "rows.jsonl", phases) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["measured"] and row["n"] == len(ROWS) for row in rows)
    assert {row["way"] for row in rows} == set(json.loads(capsys.readouterr().out))


def test_a_round_has_a_row_for_each_way_and_stage_and_finds_what_a_plain_search_finds() -> None:
    target = target_of(made(ROWS))
    rounds = Rounds(target, ROWS[:50] + 0.1, 2, 0.1, 0)
    rows = list(rounds.rows(0.2, 1))
    assert {(row["way"], row["stage"]) for row in rows} == {
        (way, stage) for way in ("ideal", *Way) for stage in Stage
    }
    assert all(row["identical_ids"] for row in rows if row["way"] != "ideal")
    assert len(rows) == 2 * (1 + len(Way))


def test_a_stopwatch_tells_compiled_code_from_all_else() -> None:
    times = iter([0.0, 2.0, 7.0, 7.5, 8.5, 10.0])
    watch = Stopwatch(lambda: next(times))
    with watch.compiled():
        pass
    with watch.choosing():
        pass
    watch.stop()
    assert (watch.other_s(), watch.choosing_s) == (5.0, 1.0)


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
