"""What another route would have saved at each decision, and what can be learned of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from eval import cli
from eval.compare import simulated, simulated_window
from eval.compare.clairvoyant import Clairvoyant
from eval.compare.config import load_config
from eval.compare.deviations import Deviation, deviations
from eval.compare.drive import Study
from eval.compare.observable import saved
from eval.compare.way import Way
from eval.simulation import planned
from ppd.decision import Decision, Features
from ppd.score import Weights
from ppd.table import Table

TABLE = Path("tables/llama-3.1-8b-h100-1P1D.json")
TOML = """
seeds = [7, 8]
policies = ["pd", "full"]
weightings = [{ ttft = 1.0, tpot = 1.0 }]
[simulated]
machine = { profile = "llama-3.1-8b-h100-tp1", link_gbps = 25 }
foreseen = 0
[[traces]]
name = "busy"
workload = "grid?context=6000&new=40,1500&out=100&turns=3&think_s=1"
conversations = 12
qps = 6.0
poisson = true
"""
REAL = "\n".join(line for line in TOML.splitlines() if line[:3] not in ("[si", "mac", "for"))


def study(tmp_path: Path, text: str = TOML) -> Study:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return Study(load_config(path), {}, None, TABLE)


def one_window(tmp_path: Path) -> tuple[simulated_window.Cluster, simulated_window.Window]:
    of = study(tmp_path)
    assert of.config.simulated is not None
    cluster = simulated_window.Cluster(of.config.simulated, Table.parse(TABLE.read_bytes()))
    return cluster, next(iter(simulated.windows_of(of)))


def test_other_routes_are_tried_beside_a_run_that_they_do_not_change(tmp_path: Path) -> None:
    cluster, place = one_window(tmp_path)
    way = Way("ppd", Weights())
    window = planned.simulated(place.planned, end_at_cuts=True)
    tried = 0

    def note(_features: Features, _decision: Decision, _saved: float) -> bool:
        nonlocal tried
        tried += 1
        return False

    def cost(_turn: object, ttft_ms: float, tpot_ms: float) -> float:
        return ttft_ms + tpot_ms

    policy = cluster.policy(way)
    with Clairvoyant(policy, cost, lambda: beside.clock.now_ms, 1e3, note) as foresight:
        beside = cluster.simulation(way, foresight, place.seed)
        result = beside.run(window)
    alone = cluster.run(way, cluster.policy(way), window, place.seed)
    assert result.rows == alone.rows
    assert tried == sum(row.turn > 1 for row in alone.rows)


def test_local_turns_cost_less_where_the_prefill_worker_has_a_queue(tmp_path: Path) -> None:
    cluster, place = one_window(tmp_path)
    found = deviations(cluster, Weights(), place)
    assert len(found) == 2 * 12
    assert {one.is_local for one in found} == {False, True}
    assert sum(one.local_costs for one in found) < 0.0
    assert len({len(one.observed) for one in found}) == 1


def made(cost_of: str) -> list[Deviation]:
    """Decisions by chance; ``observed`` or ``hidden`` decides what pays."""
    source = random.Random(0)
    found = []
    for seed in range(3):
        for _ in range(800):
            observed, hidden = source.uniform(-1, 1), source.uniform(-1, 1)
            cost = observed if cost_of == "observed" else hidden
            found.append(Deviation(seed, (observed, 1.0), source.random() < 0.5, cost))
    return found


def test_what_is_observed_can_be_learned() -> None:
    found = saved(made("observed"))
    assert found["ppd"] == pytest.approx(0.0, abs=0.02)
    assert found["foresight"] == pytest.approx(0.25, abs=0.02)
    assert found["learner"] > 0.95 * found["foresight"]
    assert found["learner_ahead"] == 3
    assert found["explained"] > 0.9


def test_what_is_hidden_cannot() -> None:
    found = saved(made("hidden"))
    assert found["foresight"] == pytest.approx(0.25, abs=0.02)
    assert found["learner"] < 0.1 * found["foresight"]
    assert found["explained"] < 0.05


def test_the_command_writes_a_row_for_each_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path)
    out = tmp_path / "out.jsonl"
    asked = ["simulate", "observable", f"{tmp_path}/compare.toml", "--table", str(TABLE)]
    with pytest.raises(SystemExit, match="0"):
        cli.main([*asked, "--windows", "2", "--processes", "1", "--out", str(out)])
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["decisions"] == 2 * 12 * 2
    assert row["foresight"] >= max(row["ppd"], row["learner"], row["local"], 0.0)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["traces"][0]["foresight"] == row["foresight"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TOML, ("--windows", "1"), "--windows must be at least 2, got 1"),
        (TOML, ("--processes", "0"), "--processes must be at least 1, got 0"),
        (TOML, (), "give --table"),
        (REAL, (), "must have a section .simulated."),
    ],
)
def test_what_cannot_be_learned_is_refused(
    tmp_path: Path, text: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "compare.toml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        cli.main(["simulate", "observable", f"{tmp_path}/compare.toml", *options])
