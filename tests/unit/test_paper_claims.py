"""The paper's grid in small: every claim is computed, and says so where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import cli
from eval.simulation import command
from eval.simulation.cost_model import paper_model
from eval.simulation.paper_claims import claims
from eval.simulation.paper_grid import CATEGORIES, CONFIGURATIONS, Harness, measure, points
from eval.simulation.paper_interference import Beside, curves, slowdown
from eval.simulation.traffic import TurnTokens, Workload
from eval.simulation.workers import Shape

COSTS = paper_model()
FAILING = ("3P_1D", "3P_1pD", "2P_2D", "2P_2pD", "4R")
SMALL = Workload("small_tiny", (TurnTokens(128, 16), TurnTokens(16, 8)), (1, 8))


def test_the_configurations_are_the_papers() -> None:
    assert len(CONFIGURATIONS) == len(set(CONFIGURATIONS)) == 17
    assert all(Shape.parse(name).workers == 4 for name in CONFIGURATIONS)
    # The paper counts 1P_2D_1pD and the like as partial; hybrids keep replicas.
    assert all(Shape.parse(name).replica for name in (*CATEGORIES["4R"], *CATEGORIES["hybrid"]))


def test_every_claim_has_a_value() -> None:
    harness = Harness(duration_s=5.0)
    rows = [measure(point, harness, COSTS) for point in points([SMALL], CONFIGURATIONS, 0)]
    stated = claims(rows, COSTS)
    assert len(stated) == 2 * 9 + 15 + 1 + 20 + 12 + 3 + 1
    missing = {claim.name for claim in stated if claim.simulated is None}
    # None was measured above QPS 8.
    assert missing == {f"{shape} high QPS" for shape in ("1P3D", "2P2D", "3P1D")} | {
        f"{name} QPS {qps}" for name in FAILING for qps in (12, 16, 20)
    }
    wins = [claim for claim in stated if claim.group == "wins by TTFT"]
    assert sum(claim.simulated or 0 for claim in wins) <= 100


def test_interference() -> None:
    alone = Beside(200, 2048)
    assert slowdown(COSTS, alone, shared=False) == 0
    for shared in (False, True):
        one = slowdown(COSTS, Beside(200, 2048, 1), shared=shared)
        assert 0 < one < slowdown(COSTS, Beside(200, 2048, 4), shared=shared)
    # Computing a prompt costs decodes much the same with and without its context. What costs
    # them more is to lose the prefix that the batch shares.
    full, append = Beside(200, 2048, 1, full=True), Beside(200, 2048, 1)
    assert slowdown(COSTS, full, shared=False) < slowdown(COSTS, append, shared=False)
    assert slowdown(COSTS, full, shared=True) > 10 * slowdown(COSTS, append, shared=True)


def test_the_curves_are_those_of_the_figures() -> None:
    drawn = list(curves(COSTS))
    for point in drawn:
        beside = Beside(point.batch, point.context, point.prefills, point.full, point.tokens)
        assert point.slowdown == pytest.approx(
            slowdown(COSTS, beside, shared=point.shared), abs=1e-4
        )
        assert (point.measured is None) is (point.figure != "earlier run")
    assert {point.figure for point in drawn} == {"2", "7", "8", "earlier run"}
    # An earlier run's appends were shorter, and cost less.
    at = [point for point in drawn if (point.batch, point.prefills, point.shared) == (200, 1, True)]
    shorter, longer = (
        next(p.slowdown for p in at if p.figure == figure and not p.full)
        for figure in ("earlier run", "2")
    )
    assert shorter < longer


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "w.json", tmp_path / "rows.jsonl"
    turns = [{"new": 128, "out": 16}, {"new": 16, "out": 8}]
    path.write_text(json.dumps([{"name": "mine", "turns": turns, "qps": [2], "think_s": 0}]))
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["simulate", "paper", "--workloads", str(path), "--processes", "1", "--out", str(out)]
        )
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["points"] == 17
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in rows].count("point") == 17
    assert rows[-1]["row"] == "run"
    kinds = {row["row"] for row in rows}
    assert kinds == {"point", "claim", "curve", "run"}  # measured: other workloads


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text("[]")
    for option in (["--duration-s", "0"], ["--connections", "-1"], ["--processes", "0"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["simulate", "paper", "--workloads", str(path), *option])
        assert "must be" in str(ended.value.code)


def test_processes_change_nothing() -> None:
    work = list(points([SMALL], ("2P_2pD",), 0))
    alone = [measure(point, Harness(), COSTS) for point in work]
    assert command.measure_all(work, Harness(), COSTS, 2) == alone
