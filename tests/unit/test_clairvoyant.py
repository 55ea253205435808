"""Comparisons on a simulated cluster: the clairvoyant's forks, its bound, all verdicts together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eval import cli
from eval.compare import family, simulated, simulated_window
from eval.compare.clairvoyant import Clairvoyant
from eval.compare.config import load_config, ways, window
from eval.compare.costs import Question, Sample, Turns, once
from eval.compare.drive import Study, measured, read_rows
from eval.compare.rollout import RolloutError
from eval.compare.verdict import judged
from eval.compare.way import Way
from eval.simulation import planned
from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.errors import ConfigError
from ppd.policies import AlwaysLocal
from ppd.score import Objective, Weights
from ppd.table import Table

from .fixtures import FEATURES

TOML = """
seeds = [0, 1]
policies = ["replica", "pd-full", "pd", "full", "threshold"]
weightings = [{ ttft = 1.0, tpot = 1.0 }, { ttft = 1.0, tpot = 3.0 }]
targets = [{ ttft_ms = 50.0, tpot_ms = 9.0 }]
[simulated]
machine = { profile = "llama-3.1-8b-h100-tp1", link_gbps = 25 }
clairvoyant = [{ ttft = 1.0, tpot = 1.0 }, { ttft = 1.0, tpot = 3.0 }]
foreseen = 1
horizon_s = 5
[[traces]]
name = "busy"
workload = "grid?context=6000&new=40,1500&out=100&turns=3&think_s=1"
also = ["turns:3?first=500&new=100&out=60&think_s=1"]
conversations = 12
qps = 3.0
poisson = true
"""


def config_file(tmp_path: Path, text: str = TOML) -> Path:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the comparison above."""
    folder = tmp_path_factory.mktemp("compare")
    config = load_config(config_file(folder))
    assert config.simulated is not None
    out = folder / "rows.jsonl"
    simulated.run(Study(config, {}, None, None), config.simulated, out, processes=1)
    return out


def test_every_way_serves_the_same_turns(rows: Path) -> None:
    every = read_rows(rows)
    turns = {
        way: sorted(
            (row["seed"], row["conversation"], row["turn"])
            for row in every
            if row["row"] == "turn" and row["way"] == way
        )
        for way in {row["way"] for row in every}
    }
    foresight = {"clairvoyant 1:1", "clairvoyant 1:3"}
    assert set(turns) - foresight == {
        *("replica", "pd-full", "pd", "full", "threshold", "pd again"),
        *("ppd 1:1", "ppd 1:3", "ppd 50/9 ms"),
    }
    first = [turn for turn in turns["pd"] if turn[0] == 0]
    for way, of_way in turns.items():
        assert of_way == (first if way in foresight else turns["pd"])


def test_foresight_costs_no_more_than_the_best_static_policy(rows: Path, tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path))
    judgement = judged(config, config.traces[0], read_rows(rows))
    found = {v["weights"]: v["foreseen"] for v in judgement["verdicts"] if "foreseen" in v}
    assert set(found) == {"1:1", "1:3"}
    assert all(one["clairvoyant"] <= one["best"] for one in found.values())
    assert min(one["clairvoyant"] - one["best"] for one in found.values()) < -0.01
    assert {v["at"] for v in judgement["verdicts"] if "foreseen" in v} == {"each"}
    family.correct([judgement])
    assert {one["verdict"] for one in found.values()} == {"ties"}, "one window decides nothing"
    assert all(one["clairvoyant"] <= min(one["foresight"], one["ppd"]) for one in found.values())
    assert family.summary([judgement])["clairvoyant_wins"] == "0 of 2"
    for verdict in judgement["verdicts"]:
        if verdict["at"] == "each":
            assert verdict["costs"]["pd"] == pytest.approx(
                sum(map(int, verdict["weights"].split(":")))
            )


def test_a_kept_fork_is_as_good_as_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AlwaysNew(Clairvoyant):
        def _explore(self, features: Features, usual: Decision) -> Route:
            route = super()._explore(features, usual)
            if self._fork is None:
                assert self._kept is not None
                self._kept.close()
                self._kept = None
            return route

    config = load_config(config_file(tmp_path))
    assert config.simulated is not None
    (first, _) = simulated.windows_of(Study(config, {}, None, None))
    table = Table.parse(Path("tables/llama-3.1-8b-h100-1P1D.json").read_bytes())
    cluster = simulated_window.Cluster(config.simulated, table)
    kept = simulated_window.rows_of(cluster, first)
    monkeypatch.setattr(simulated_window, "Clairvoyant", AlwaysNew)
    new = simulated_window.rows_of(cluster, first)

    def turns(of: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        fields = ("way", "conversation", "turn", "route", "ttft_ms", "tpot_ms")
        return [
            tuple(row[field] for field in fields)
            for row in of
            if row["row"] == "turn" and row["way"].startswith("clairvoyant ")
        ]

    assert turns(new) == turns(kept)
    assert {row["table"] for row in kept if row["row"] == "run"} == {table.record.digest}
    assert {route for *_, route, _, _ in turns(new)} >= {"local", "remote"}


def test_a_base_may_move_conversations_to_other_homes(tmp_path: Path) -> None:
    class AwayFromHome(Policy):
        """Every later turn is remote, and decoded elsewhere."""

        def choose(self, features: Features, objective: Objective) -> Decision:
            return Decision(Route.REMOTE, Reason.HOME_FULL)

    config = load_config(config_file(tmp_path))
    assert config.simulated is not None
    simulation = msgspec.structs.replace(config.simulated, shape="1P_2pD")
    (first, _) = simulated.windows_of(Study(config, {}, None, None))
    cluster = simulated_window.Cluster(simulation, None)
    way = Way("clairvoyant", Weights())

    def cost(turn: object, ttft_ms: float, tpot_ms: float) -> float:
        return ttft_ms

    with Clairvoyant(AwayFromHome(), cost, lambda: served.clock.now_ms, 1e3) as policy:
        served = cluster.simulation(way, policy, 0)
        result = served.run(planned.simulated(first.planned, end_at_cuts=True))
    assert not any(row.failed for row in result.rows)
    assert Reason.HOME_FULL in {row.reason for row in result.rows}


def test_where_foresight_does_harm_the_clairvoyant_takes_the_best_policy(
    rows: Path, tmp_path: Path
) -> None:
    config = load_config(config_file(tmp_path, TOML.replace("foreseen = 1", "foreseen = 2")))
    every = [dict(row) for row in read_rows(rows)]
    served = [row for row in every if not row["way"].startswith("clairvoyant ")]
    for foresight in ("clairvoyant 1:1", "clairvoyant 1:3"):
        for row in [row for row in served if row["way"] == "full"]:
            # Twice as fast as the best policy in the first window, and slower in the second.
            times = 0.25 if row["seed"] == 0 else 4.0
            made = row | {"way": foresight}
            if row["row"] == "turn":
                made |= {"ttft_ms": times * row["ttft_ms"], "tpot_ms": times * row["tpot_ms"]}
            served.append(made)
    judgement = judged(config, config.traces[0], served)
    for verdict in judgement["verdicts"]:
        if (found := verdict.get("foreseen")) is not None:
            assert found["windows"] == 2
            assert found["foresight_best"] == 1
            assert found["clairvoyant"] < min(found["best"], found["foresight"])


def test_the_same_policy_again_takes_other_times(rows: Path) -> None:
    """Its arrivals are moments apart, so that chance has something to do."""
    ttft_ms = {
        way: [
            row["ttft_ms"]
            for row in read_rows(rows)
            if row["row"] == "turn" and row["way"] == way and row["seed"] == 0
        ]
        for way in ("pd", "pd again")
    }
    assert len(ttft_ms["pd"]) == len(ttft_ms["pd again"])
    assert ttft_ms["pd"] != ttft_ms["pd again"]


def test_chance_makes_no_way_dearer() -> None:
    source = np.random.default_rng(0)
    one, other = (np.exp(source.normal(3.0, 1.0, (20_000, 2))) for _ in range(2))
    every = {"pd": Turns({(0, 0): one}, 0), "again": Turns({(0, 0): other}, 0)}
    sample = Sample(every, [(0, 0)])
    cost = sample.costs([Question(Weights(), "each")], once([(0, 0)]))["again"]
    assert (other / one).mean() > 2, "by an arithmetic mean it would be"
    assert cost == pytest.approx(2.0, abs=0.05)


def test_full_transfer_moves_more(rows: Path) -> None:
    moved = {
        row["way"]: row["kv_bytes_moved"]
        for row in read_rows(rows)
        if row["row"] == "run" and row["seed"] == 0
    }
    assert moved["pd-full"] > moved["pd"] > moved["full"] > moved["replica"] == 0


def test_what_was_simulated_is_not_simulated_again(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows.read_bytes()
    verdicts = tmp_path / "verdicts.jsonl"
    path = str(config_file(tmp_path))
    with pytest.raises(SystemExit) as done:
        cli.main(["compare", path, "--out", str(rows), "--verdicts", str(verdicts)])
    assert done.value.code == 0
    assert rows.read_bytes() == before
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["comparisons"] == 7 == last["wins"] + last["ties"] + last["losses"]
    assert last["a_a_ties"] == "7 of 7"
    (row,) = map(json.loads, verdicts.read_text().splitlines())
    assert row["link_gbps"] == 25
    assert row["raw_commits"] == [row["commit"]]
    with pytest.raises(SystemExit) as done:
        cli.main(["compare", path, "--out", str(verdicts), "--verdict-only"])
    assert done.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == last, "without the raw rows"


def test_a_window_may_be_every_third_conversation(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    sessions = [
        {"s": s, "k": 1, "t": 1.0 * s, "in": 100 + s, "ctx": 0, "new": 100 + s, "out": 10}
        for s in range(7)
    ]
    chat.write_text("".join(json.dumps(row) + "\n" for row in sessions))
    text = TOML[: TOML.index("[[traces]]")]
    text += (
        '[[traces]]\nname = "chat"\nworkload = "sessions:{chat}"\nconversations = 9\nevery = 3\n'
    )
    config = load_config(config_file(tmp_path, text))
    found = window(config.traces[0], {"chat": chat}, None, 1)
    assert [one.turns[0].new_tokens for one in found] == [101, 104]
    assert [one.starts_at_s for one in found] == [1.0, 4.0]
    with pytest.raises(ConfigError, match="has 3 windows"):
        window(config.traces[0], {"chat": chat}, None, 3)
    spread = msgspec.structs.replace(config.traces[0], spread_s=5.0)
    later = window(spread, {"chat": chat}, None, 1)
    assert later == window(spread, {"chat": chat}, None, 1)
    # The same conversations, though some may have changed their order.
    assert sorted(one.turns[0].new_tokens for one in later) == [101, 104]
    by_size = {one.turns[0].new_tokens: one.starts_at_s for one in later}
    assert 1.0 < by_size[101] < 6.0
    assert 4.0 < by_size[104] < 9.0


def test_without_foreseen_windows_there_is_no_clairvoyant(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, TOML.replace("foreseen = 1", "foreseen = 0")))
    assert not any(way.policy == "clairvoyant" for way in ways(config))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("link_gbps = 25", "link_gbps = 0", "link_gbps must be above 0"),
        ("horizon_s = 5", "horizon_s = 0", "horizon_s must be above 0"),
        ("foreseen = 1", "foreseen = -1", "foreseen must be 0 or more windows"),
        ("poisson = true", "poisson = true\nspread_s = 2", "spread_s must be 0 or more, and"),
        ("horizon_s = 5", 'shape = "1P_1D"', "must have P and pD alone"),
        ("horizon_s = 5", 'shape = "2X"', "no such shape"),
        ("clairvoyant = [{ ttft = 1.0", "clairvoyant = [{ ttft = 2.0", "that are in weightings"),
        ("qps = 3.0\npoisson = true", "qps = 3.0", "also needs poisson"),
        ("poisson = true", "poisson = true\nevery = 2", "every must be at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(config_file(tmp_path, TOML.replace(old, new)))


def test_an_unknown_profile_is_named(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, TOML.replace("llama-3.1-8b-h100-tp1", "none")))
    assert config.simulated is not None
    with pytest.raises(ConfigError, match="no profile 'none'"):
        simulated.run(
            Study(config, {}, None, None), config.simulated, tmp_path / "rows.jsonl", processes=1
        )


def test_a_fork_that_dies_is_an_error() -> None:
    def cost(turn: object, ttft_ms: float, tpot_ms: float) -> float:
        return 0.0

    policy = Clairvoyant(AlwaysLocal(), cost, lambda: 0.0, 1.0)
    parent = os.getpid()

    def choose() -> None:
        policy.choose(FEATURES, Weights())
        if os.getpid() != parent:  # a fork, which here has no simulation to go on with
            os._exit(1)

    with pytest.raises(RolloutError, match="ended with exit code 1"):
        choose()


def test_holm_rejects_step_by_step() -> None:
    assert family.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert family.holm([0.02, 0.02, 0.02]) == [False, False, False]
    assert family.holm([]) == []


def test_foresight_is_corrected_apart_from_other_verdicts() -> None:
    sure, chance = ({"p": p, "p_again": 1.0, "difference": -0.1} for p in (0.001, 0.9))
    verdicts: list[dict[str, Any]] = [
        {**sure, "foreseen": {"p": p, "better": better, "best": 2, "ppd": 2, "clairvoyant": 1}}
        for p, better in ((0.02, True), (0.001, False))
    ]
    family.correct([{"verdicts": [*verdicts, *(dict(chance) for _ in range(50))]}])
    assert [one["foreseen"]["verdict"] for one in verdicts] == ["beats", "loses"]
    summary = family.summary([{"trace": "chat", "verdicts": verdicts}])
    assert summary["clairvoyant_wins"] == "1 of 2"


def test_a_clairvoyant_costs_no_more_than_foresight_in_all_windows() -> None:
    """The best of each window may cost more, for costs of windows do not add up."""
    verdict = {"difference": 0.1, "verdict": "ties"}
    foreseen = {"best": 2.0, "ppd": 1.9, "foresight": 1.6, "clairvoyant": 1.8}
    summary = family.summary([{"trace": "chat", "verdicts": [verdict | {"foreseen": foreseen}]}])
    assert (summary["clairvoyant_gain"], summary["clairvoyant_share"]) == (0.2, 0.25)


def test_a_difference_without_spread_is_certain() -> None:
    assert family.p_value(0.0, np.zeros(10), 3) == 1.0
    assert family.p_value(0.1, np.full(10, 0.1), 3) == 0.0


def test_few_windows_make_a_difference_less_certain() -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.5, 10_000)
    many = family.p_value(1.0, draws, 10_000)
    assert many == pytest.approx(0.0455, abs=0.005)
    assert family.p_value(1.0, draws, 3) > family.p_value(1.0, draws, 8) > many
    assert family.p_value(1.0, draws, 1) == 1.0


def test_of_one_window_the_conversations_are_drawn_again() -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.5, 999)
    assert family.p_in_window(1.0, draws) == pytest.approx(0.0455, abs=0.02)
    assert family.p_in_window(-1.0, -draws) == family.p_in_window(1.0, draws)
    assert family.p_in_window(0.1, np.full(999, 0.1)) == 0.002  # no less than draws can show
    assert family.p_in_window(0.0, np.zeros(999)) == 1.0
    assert family.p_in_window(-0.1, draws) == 1.0  # most draws have the other sign


def test_chance_between_few_windows_seldom_makes_a_verdict() -> None:
    source = np.random.default_rng(0)
    wrong = 0
    for _ in range(1_000):
        windows = source.normal(0.0, 1.0, 4)  # no true difference
        drawn = windows[source.integers(0, 4, (300, 4))].mean(axis=1)
        wrong += family.p_value(float(windows.mean()), drawn, 4) < 0.05
    assert wrong <= 70


def test_the_measured_rows_of_a_simulation_are_complete(rows: Path) -> None:
    assert {("busy", seed, "pd") for seed in (0, 1)} <= measured(rows)


def test_a_win_too_small_to_be_shown_is_no_loss() -> None:
    tiny: dict[str, Any] = {"difference": -0.0, "better": True, "p": 0.0, "p_again": 1.0}
    for _ in range(2):  # as it is measured, and as a report reads it
        family.correct([{"verdicts": [tiny]}])
        assert tiny["verdict"] == "beats"
    older: dict[str, Any] = {"difference": -0.1, "p": 0.0, "p_again": 1.0}
    family.correct([{"verdicts": [older]}])
    assert older["verdict"] == "beats"
