"""Clusters of any size: pauses against retention, traces, plans, and their commands."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from eval import cli
from eval.simulation.cost_model import VLLM_H100, CostModel, Serving, paper_model
from eval.simulation.fit import fit
from eval.simulation.study import Routing, StudyRow, Traffic, plan, study, weigh
from eval.simulation.traffic import TurnTokens, Workload, load, mixed, traced
from eval.simulation.workers import PlacementRule
from ppd.errors import ConfigError
from ppd.score import Targets, Weights

from .fixtures import TABLE

COSTS = paper_model()
CHAT = Workload("chat", (TurnTokens(2000, 100), TurnTokens(100, 100)), (1.0,))


def traffic(qps: float = 2.0, think_s: float | None = None) -> Traffic:
    return Traffic((CHAT,), qps, 60.0, think_s)


def test_memory_keeps_conversations_for_so_long() -> None:
    """Whoever thinks longer than the KV is kept finds nothing."""
    kept = 12_000 * 131_072 + 16.06e9 + VLLM_H100.activation_bytes
    small = CostModel(COSTS.model, replace(COSTS.gpu, memory_bytes=kept / 0.85), VLLM_H100)
    rows = [study(small, "1P_1pD", "full", traffic(1.0, think_s), 0) for think_s in (0.1, 300.0)]
    quick, slow = rows
    assert quick.lost_share < 0.1 < 0.8 < slow.lost_share
    assert quick.local_share > 0.9
    assert slow.t2_ttft_p50_ms > 2 * quick.t2_ttft_p50_ms


def test_a_larger_cluster_under_the_same_load_each() -> None:
    small = study(COSTS, "1P_3pD", "full", traffic(4.0), 0)
    large = study(COSTS, "16P_48pD", "full", traffic(64.0), 0)
    assert large.workers == 16 * small.workers
    assert large.turns > 12 * small.turns
    assert large.t2_ttft_p50_ms == pytest.approx(small.t2_ttft_p50_ms, rel=0.1)


def test_the_tables_policy_weighs_as_on_a_router() -> None:
    def local_share(w_tpot: float) -> float:
        routing = Routing(TABLE, Weights(1.0, w_tpot))
        return study(COSTS, "1P_3pD", "ppd", traffic(2.0), 0, routing=routing).local_share

    # With much weight on TPOT a turn is local only where nothing decodes, so that it delays nobody.
    assert local_share(1.0) > 0.9
    assert 0.0 < local_share(1000.0) < 0.5
    with pytest.raises(ConfigError, match="--table"):
        study(COSTS, "1P_3pD", "ppd", traffic(), 0)


def test_placement_evens_out_what_chance_does_not() -> None:
    def slowest_tpot_ms(placement: PlacementRule) -> float:
        routing = Routing(placement=placement)
        row = study(COSTS, "8R", "replica", traffic(40.0), 0, routing=routing)
        assert row.placement == placement
        return row.tpot_p99_ms

    by = {placement: slowest_tpot_ms(placement) for placement in PlacementRule}
    assert by[PlacementRule.LEAST_LOADED] < by[PlacementRule.CHANCE]
    assert by[PlacementRule.BOUNDED_HASH] < by[PlacementRule.CHANCE]


def test_the_fewest_workers() -> None:
    targets = Targets(ttft_ms=250.0, tpot_ms=10.5)
    tried, best = plan(COSTS, traffic(6.0), targets, 0.95, 6, 0)
    assert best is not None
    assert best.ok_share is not None
    assert best.ok_share >= 0.95
    assert all((row.ok_share or 0) < 0.95 for row in tried if row.workers < best.workers)
    assert {row.workers for row in tried} == set(range(1, best.workers + 1))
    assert plan(COSTS, traffic(12.0), Targets(ttft_ms=1.0), 0.95, 2, 0)[1] is None


def test_of_clusters_that_all_meet_the_targets_the_one_with_most_room() -> None:
    targets = Targets(ttft_ms=2000.0, tpot_ms=10.5)
    tried, best = plan(COSTS, traffic(4.0), targets, 0.99, 4, 0)
    by = {row.shape: row for row in tried}
    assert by["1P_1D"].ok_share == by["1P_1pD"].ok_share == 1.0
    assert by["1P_1D"].t2_ttft_p99_ms > 5 * by["1P_1pD"].t2_ttft_p99_ms
    assert best == by["1P_1pD"]


def test_a_plan_prints_the_routers_options() -> None:
    row = {shape: study(COSTS, shape, "full", traffic(1.0), 0) for shape in ("1P_1pD", "1P_1D")}
    local = weigh(COSTS, row["1P_1pD"], traffic(1.0), 0)
    assert local is not None
    assert local.weights.ttft == 1.0
    assert local.local_up_to is None or local.weights.tpot < local.local_up_to
    remote = weigh(COSTS, row["1P_1D"], traffic(1.0), 0)
    assert remote is None or remote.weights.tpot > (remote.local_up_to or 0)
    assert weigh(COSTS, study(COSTS, "2R", "replica", traffic(1.0), 0), traffic(1.0), 0) is None


def test_a_turn_that_no_worker_can_hold_is_named() -> None:
    long = Workload("book", (TurnTokens(500_000, 100),), (1.0,))
    with pytest.raises(ConfigError, match=r"conversation 0 has a turn of 500,100 tokens.* holds"):
        study(COSTS, "1R", "replica", Traffic((long,), 1.0, 10.0), 0)


def test_arrivals_of_a_mix() -> None:
    some = list(mixed((CHAT,), 10.0, 60.0, 5.0, random.Random(0)))
    assert 500 < len(some) < 700
    assert max(one.at_s for one in some) < 60.0
    assert 4.0 < sum(one.think_s[0] for one in some) / len(some) < 6.0


def test_the_papers_workloads_need_no_file() -> None:
    every = {one.name: one for one in load(Path("paper"))}
    assert len(every) == 18
    assert every["large_big_paste"].turns == (TurnTokens(1024, 1024), TurnTokens(512, 64))
    assert every["small_tiny"].qps == (0.5, 1, 2, 4, 6, 8, 10, 12, 16, 20)


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"s": 7, "k": 3, "t": 20.0, "ctx": 500, "new": 10, "out": 5},
        {"s": 7, "k": 4, "t": 50.0, "ctx": 515, "new": 20, "out": 0},
        {"s": 8, "k": 1, "t": 21.0, "ctx": 0, "new": 30, "out": 9},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, again, other, _ = traced(path, 2)
    assert one.turns == again.turns == (TurnTokens(510, 5), TurnTokens(20, 1))
    assert (one.think_s, one.since_arrival) == ((30.0,), True)
    assert (one.at_s, again.at_s, other.at_s) == (20.0, 20.5, 21.0)
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:4: .*missing required field"):
        traced(path, 1)


def test_a_trace_that_forks_or_cuts_its_history_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = (
        (1, 0.0, 0, 100, 10),
        (2, 5.0, 110, 20, 5),
        (2, 6.0, 110, 50, 5),  # regenerated
        (3, 9.0, 130, 7, 5),  # without the reply before
        (4, 12.0, 90, 10, 5),  # cut
        (5, 15.0, 105, 10, 5),
    )
    rows = [dict(zip("skt", (0, k, t), strict=True)) for k, t, *_ in turns]
    for row, (*_, ctx, new, out) in zip(rows, turns, strict=True):
        row |= {"ctx": ctx, "new": new, "out": out}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = traced(path, 1)
    assert [one.turns for one in found] == [
        (TurnTokens(160, 5),),
        (TurnTokens(100, 10), TurnTokens(20, 5), TurnTokens(7, 5, drops_reply=True)),
        (TurnTokens(100, 5), TurnTokens(10, 5)),
    ]
    assert [one.at_s for one in found] == [6.0, 0.0, 12.0]
    assert found[1].think_s == (5.0, 4.0)


def test_a_traced_turn_comes_when_it_came_or_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"s": 0, "k": k, "t": t, "ctx": 1_100 * (k - 1), "new": 100, "out": 1000}
        for k, t in ((1, 0.0), (2, 1.0), (3, 60.0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = study(COSTS, "1R", "full", Traffic(trace=path), 0)
    assert row.turns == 3
    # The second follows the first's reply (8 s); the third keeps its 59 s after the second.
    assert 59.0 < 3 / row.qps < 70.0


def test_a_fit_finds_what_made_the_numbers() -> None:
    def times(serving: Serving) -> list[float]:
        costs = CostModel(COSTS.model, COSTS.gpu, serving)
        return [
            costs.local_ttft_ms(64, 0),
            costs.local_ttft_ms(4000, 0),
            costs.decode_ms(100, 1, 100),
            costs.decode_ms(100, 50, 100_000),
        ]

    truth = times(VLLM_H100)
    free = ("compute_share", "memory_share", "step_ms", "request_ms")
    start = replace(VLLM_H100, compute_share=0.4, memory_share=0.8, step_ms=4.0, request_ms=15.0)
    found = fit(
        start, free, lambda serving: [a / b - 1 for a, b in zip(times(serving), truth, strict=True)]
    )
    for name in free:
        assert getattr(found, name) == pytest.approx(getattr(VLLM_H100, name), rel=0.02)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *arguments])
    return ended.value.code


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "w.json", tmp_path / "rows.jsonl"
    turns = [{"new": 200, "out": 16}, {"new": 16, "out": 8}]
    path.write_text(json.dumps([{"name": "mine", "turns": turns, "qps": [2], "think_s": 0}]))
    mine = ("--workloads", str(path), "--qps", "2", "--duration-s", "10", "--out", str(out))
    assert run("cluster", *mine, "--shapes", "1P_1pD", "2R", "--think-s", "0", "5") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["shape"], line["think_s"]) for line in lines] == [
        ("1P_1pD", 0),
        ("1P_1pD", 5),
        ("2R", 0),
        ("2R", 5),
    ]
    assert set(lines[0]) == set(StudyRow.__slots__)
    shipped = Path(__file__).parents[2] / "tables/cpu-tiny-llama-1P1D.json"
    table = ("--policies", "ppd", "--table", str(shipped), "--w-tpot", "0")
    placed = ("--placement", "chance", "least-loaded")
    assert run("cluster", *mine[:-2], "--shapes", "1P_1pD", *table, *placed) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["placement"] for line in lines] == ["chance", "least-loaded"]
    assert all(line["policy"] == "ppd" and line["local_share"] > 0.5 for line in lines)
    assert run("plan", *mine, "--slo-ttft-ms", "200", "--max-workers", "2") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["best"]["shape"] == "1R"
    assert "w_tpot" not in summary  # replicas decide nothing
    written = [json.loads(line)["row"] for line in out.read_text().splitlines()]
    assert written == [*["study"] * 5, "plan"]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text("[]")
    some = ("--workloads", str(path))
    assert "targets" in str(run("plan", *some))
    assert "none of these" in str(run("plan", *some, "--slo-ttft-ms", "9"))
    assert "--workloads or --trace" in str(run("cluster", "--shapes", "1R"))
    path.write_text('[{"name": "a", "turns": [{"new": 9, "out": 9}], "qps": [1]}]')
    assert "no such shape" in str(run("cluster", *some, "--shapes", "1X"))
