"""Comparing policies on traces: windows, raw rows, verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eval import cli
from eval.compare.config import Comparison, Trace, load_config, ways, window
from eval.compare.drive import Study
from eval.compare.emulated import table_for
from eval.compare.way import Way, label, parse
from eval.traffic.conversations import Conversation, PlannedTurn, within
from ppd.errors import ConfigError
from ppd.score import Objective, Targets, Weights
from ppd.table import Table

from .fixtures import costs_of, table_record

TOML = """
seeds = [0, 1]
policies = ["pd", "full"]
weightings = [{ ttft = 1.0, tpot = 1.0 }, { ttft = 1.0, tpot = 3.0 }]
[[traces]]
name = "chat"
workload = "sessions:{chat}?faster=2"
conversations = 3
qps = 2.0
"""


SHIPPED = Path(__file__).parents[2] / "eval" / "compare"


@pytest.mark.parametrize("name", ["cpu.toml", "public.toml"])
def test_what_is_shipped_can_be_run(name: str) -> None:
    config = load_config(SHIPPED / name)
    assert [trace.name for trace in config.traces] == [
        "mooncake chat",
        "tau-bench airline",
        "mini-swe agents",
    ]
    assert len(config.weightings) == 3


@pytest.fixture
def config(tmp_path: Path) -> Comparison:
    return config_of(tmp_path, TOML)


def config_of(tmp_path: Path, text: str) -> Comparison:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return load_config(path)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """Six conversations of two turns, a second apart."""
    path = tmp_path / "chat.jsonl"
    rows: list[dict[str, object]] = []
    for s in range(6):
        new = 100 + s
        rows.append({"s": s, "k": 1, "t": 1.0 * s, "in": new, "ctx": 0, "new": new, "out": 10})
        later = {"k": 2, "t": s + 4.0, "in": new + 30, "ctx": new, "new": 30, "out": 5}
        rows.append({"s": s, **later, "gap": 4.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_seed_is_the_next_window(config: Comparison, chat: Path) -> None:
    (trace,) = config.traces
    first, second = (window(trace, {"chat": chat}, None, seed) for seed in (0, 1))
    assert [one.turns[0].new_tokens for one in first] == [100, 101, 102]
    assert [one.turns[0].new_tokens for one in second] == [103, 104, 105]
    assert [one.starts_at_s for one in second] == pytest.approx([0.0, 0.5, 1.0])
    assert second[0].turns[1].gap_s == 2.0
    with pytest.raises(ConfigError, match="has 6 conversations, seed 2 wants those from 6 to 9"):
        window(trace, {"chat": chat}, None, 2)


def test_poisson_windows_draw_their_own(chat: Path) -> None:
    trace = Trace("chat", "sessions:{chat}", 40, qps=4.0, poisson=True)
    first, again, second = (window(trace, {"chat": chat}, None, seed) for seed in (0, 0, 1))
    assert first == again != second
    assert len(second) == 40
    assert 0 <= second[0].starts_at_s <= second[-1].starts_at_s <= 10.0


def test_windows_of_tuning_and_of_verdicts_share_no_conversation(chat: Path) -> None:
    trace = Trace("chat", "sessions:{chat}", 40, qps=4.0, poisson=True)
    tuned, judged = (
        {one.turns[0].new_tokens for one in window(trace, {"chat": chat}, None, seed, tuning=4)}
        for seed in (3, 4)
    )
    assert (tuned, judged) == ({101, 103, 105}, {100, 102, 104})


def test_every_way_meets_every_window(config: Comparison, chat: Path) -> None:
    order = Study(config, {"chat": chat}, None, None).order()
    assert {(seed, way.name) for _, seed, way in order} == {
        (seed, name) for seed in (0, 1) for name in ("pd", "full", "ppd 1:1", "ppd 1:3")
    }
    assert [seed for _, seed, _ in order] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("objective", "name", "headers"),
    [
        (Weights(1, 3), "1:3", {"X-PPD-W-TTFT": "1", "X-PPD-W-TPOT": "3"}),
        (Targets(500, 7.5), "500/7.5 ms", {"X-SLO-TTFT-MS": "500", "X-SLO-TPOT-MS": "7.5"}),
        (Targets(tpot_ms=30), "-/30 ms", {"X-SLO-TPOT-MS": "30"}),
    ],
)
def test_an_objective_has_a_name_and_headers(
    objective: Objective, name: str, headers: dict[str, str]
) -> None:
    assert label(objective) == name
    assert parse(name) == objective
    assert Way("ppd", objective).headers == headers


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('["pd", "full"]', '["full"]', "policies must have pd"),
        ('["pd", "full"]', '["pd", "best"]', "no such policy: 'best'"),
        ("seeds = [0, 1]", "seeds = []", "seeds, traces and weightings must name one each"),
        ("seeds = [0, 1]", "seeds = [-1]", "seeds must be 0 or more"),
        ("seeds = [0, 1]", "seeds = [0, 1]\ntuning = -1", "tuning must be 0 or more seeds"),
        ("conversations = 3", "conversations = 0", "conversations must be at least 1"),
        ("qps = 2.0", "poisson = true", "poisson needs qps"),
        ("ttft = 1.0", "ttft = -1.0", "weights must be numbers from 0"),
        ("seeds = [0, 1]", "seeds = [0, 1]\ntargets = [{}]", "one of the targets ttft_ms and tpot"),
        ("seeds = [0, 1]", "seeds = [0, 1]\ntargets = [{ ttft_ms = 9 }, { ttft_ms = 9 }]", "alike"),
        ("ttft = 1.0", "throughput = 1.0", "weightings: the costs that are compared are TTFT and"),
        ("qps = 2.0", "rate = 2.0", "unknown field `rate`"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(tmp_path, TOML.replace(old, new))


def test_a_trace_may_have_seeds_of_its_own(tmp_path: Path, chat: Path) -> None:
    config = config_of(tmp_path, TOML + "seeds = [1]\n")
    study = Study(config, {"chat": chat}, None, None)
    assert list(study.windows()) == [("chat", 1)]
    assert {seed for _, seed, _ in study.order()} == {1}
    with pytest.raises(ConfigError, match="seeds must be 0 or more"):
        config_of(tmp_path, TOML + "seeds = [-1]\n")


def test_a_missing_file_is_asked_for(tmp_path: Path, config: Comparison) -> None:
    with pytest.raises(ConfigError, match="trace chat: give --data chat=FILE"):
        window(config.traces[0], {}, None, 0)
    argv = ["compare", str(tmp_path / "compare.toml"), "--out", str(tmp_path / "o.jsonl")]
    with pytest.raises(SystemExit, match="--data takes NAME=FILE, got 'chat'"):
        cli.main([*argv, "--data", "chat"])


EMULATED = """
[emulated]
machine = { profile = "llama-3.1-8b-h100-tp1", link_gbps = 25 }
slow_motion = 20
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('["pd", "full"]', '["pd", "replica"]', "an emulated cluster serves no replica: other"),
        ("link_gbps = 25", "link_gbps = 25, slower = 1.4", "a calibration of its profile"),
        ("link_gbps = 25", "link_gbps = 0", "link_gbps must be above 0"),
        ("slow_motion = 20", "slow_motion = 0", "slow motion must be 1 to 10,000, got 0"),
        ("slow_motion = 20", 'shape = "1P1Dx2"', "shape must be as 1P1D, got '1P1Dx2'"),
        ("slow_motion = 20", 'shape = "4R"', "shape must be as 1P1D, got '4R'"),
        ("seeds = [0, 1]", 'worker_flags = ["--x"]\nseeds = [0]', "worker_flags are of real"),
        ("qps = 2.0", "seconds = 0", "seconds must be above 0"),
    ],
)
def test_what_cannot_be_emulated_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(tmp_path, (TOML + EMULATED).replace(old, new))


def test_what_is_shipped_to_be_emulated_can_be_run() -> None:
    config = load_config(SHIPPED / "emulated.toml")
    assert config.emulated is not None
    assert {trace.seconds for trace in config.traces} == {120}
    assert min(config.seeds) >= config.tuning


def test_a_table_of_the_emulated_model_is_handed_to_the_router(tmp_path: Path) -> None:
    """Emulated workers serve a small model under its own name."""
    table = tmp_path / "llama.json"
    record = table_record(costs_of, model="Llama-3.1-8B")
    table.write_bytes(msgspec.json.encode(record))
    logs = tmp_path / "logs"
    logs.mkdir()
    copy = table_for(Path("/models/small"), table, "Llama-3.1-8B", logs)
    served = Table.parse(copy.read_bytes()).record
    assert served == msgspec.structs.replace(record, model="small")
    with pytest.raises(ConfigError, match=r"of Llama-3.1-8B, and Qwen3-32B is emulated"):
        table_for(Path("/models/small"), table, "Qwen3-32B", logs)


def test_a_window_ends_after_its_seconds(chat: Path) -> None:
    whole = Trace("chat", "sessions:{chat}", 6)
    cut = Trace("chat", "sessions:{chat}", 6, seconds=4.5)
    found = window(cut, {"chat": chat}, None, 0)
    assert window(whole, {"chat": chat}, None, 0)[0].turns[1].gap_s == 4.0
    assert [one.starts_at_s for one in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(one.turns) for one in found] == [2, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"no conversation begins within 0\.5 s"):
        within([Conversation(0.5, (PlannedTurn(1, 1),))], 0.5)


Costs = Callable[[str, int], tuple[float, float]]


def rows(config: Comparison, costs: Costs, conversations: int = 30) -> list[dict[str, Any]]:
    """Two turns a conversation; ``costs`` of a way and a conversation: TTFT and TPOT in ms."""
    made: list[dict[str, Any]] = []
    for way in ways(config):
        for seed in config.seeds:
            where = {"part": "compare", "trace": "chat", "way": way.name, "seed": seed}
            for number in range(conversations):
                for turn in (1, 2):
                    ttft_ms, tpot_ms = costs(way.name, number)
                    told: dict[str, Any] = {"conversation": number, "turn": turn, "error": ""}
                    told |= {"ttft_ms": ttft_ms if turn == 2 else 1e6, "tpot_ms": tpot_ms}
                    made.append({"row": "turn", **where, **told})
            made.append(
                {
                    "row": "run", **where, "planned": 2 * conversations, "failed": 0,
                    "routes": {"remote": conversations}, "cached_tokens": 7,
                    "kv_bytes_moved": 1_000_000,
                }
            )  # fmt: skip
    return made


def verdicts(
    tmp_path: Path, told: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in told))
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(tmp_path / "compare.toml"), "--out", str(raw), "--verdict-only"])
    assert ended.value.code == 0, ended.value.code
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def test_verdicts_are_paired_and_weighted(
    tmp_path: Path, config: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    """``full`` halves TTFT and adds a fifth to TPOT; ``ppd`` does so only at even weights."""

    def costs(way: str, number: int) -> tuple[float, float]:
        ttft_ms, tpot_ms = 100.0 + 10.0 * (number % 7), 5.0
        if way in ("full", "ppd 1:1"):
            return 0.5 * ttft_ms, 1.2 * tpot_ms
        return ttft_ms, tpot_ms

    told = verdicts(tmp_path, rows(config, costs), capsys)
    (trace,) = told["traces"]
    assert trace["later_turns"] == 60
    assert trace["ways"]["full"]["ttft_p50_ms"] == 65.0
    assert trace["ways"]["pd"]["kv_mb_moved"] == 2.0
    even, heavy = trace["verdicts"][0], trace["verdicts"][2]
    assert even["weights"] == "1:1"
    assert even["costs"] == {"pd": 2.0, "full": 1.7, "ppd 1:1": 1.7}
    assert heavy["weights"] == "1:3"
    assert heavy["costs"] == {"pd": 4.0, "full": 4.1, "ppd 1:3": 4.0}
    assert [one["verdict"] for one in trace["verdicts"]] == ["ties"] * 4
    assert (told["wins"], told["ties"], told["losses"], told["comparisons"]) == (0, 4, 0, 4)
    assert told["clairvoyant_share"] is None
    assert told["a_a_ties"] is None


def test_targets_are_compared_by_the_share_of_turns_that_miss_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of the turns misses TTFT with ``pd``, a fifth TPOT with ``full``."""
    config = config_of(tmp_path, "targets = [{ ttft_ms = 100, tpot_ms = 10 }]\n" + TOML)

    def costs(way: str, number: int) -> tuple[float, float]:
        if way == "full":
            return 100.0, 10.1 if number % 5 == 0 else 0.0
        return 100.1 if way == "pd" and number % 3 == 0 else 100.0, 10.0

    made = rows(config, costs)
    assert {row["way"] for row in made} >= {"ppd 1:3", "ppd 100/10 ms"}
    (trace,) = verdicts(tmp_path, made, capsys)["traces"]
    last = trace["verdicts"][-1]
    assert (last["weights"], last["at"]) == ("100/10 ms", "missed")
    assert last["costs"] == {"pd": 0.333, "full": 0.2, "ppd 100/10 ms": 0.0}
    assert (last["best_static"], last["verdict"]) == ("full", "beats")


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "beats"), (1.5, "loses")])
def test_a_clear_difference_is_called_one(
    tmp_path: Path,
    config: Comparison,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    verdict: str,
) -> None:
    def costs(way: str, number: int) -> tuple[float, float]:
        return (factor if way.startswith("ppd") else 1.0) * (100.0 + number), 5.0

    (trace,) = verdicts(tmp_path, rows(config, costs), capsys)["traces"]
    assert {one["verdict"] for one in trace["verdicts"]} == {verdict}
    low, high = trace["verdicts"][0]["interval"]
    assert low <= trace["verdicts"][0]["difference"] <= high


def test_replicas_are_listed_but_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, TOML.replace('"full"]', '"full", "replica"]'))

    def costs(way: str, number: int) -> tuple[float, float]:
        by = {"replica": 0.3, "pd": 1.0, "full": 0.9}
        return by.get(way, 0.6) * (100.0 + number), 5.0

    (trace,) = verdicts(tmp_path, rows(config, costs), capsys)["traces"]
    for one in trace["verdicts"]:
        assert (one["verdict"], one["best_static"]) == ("beats", "full")
        assert one["costs"]["replica"] < min(one["costs"][name] for name in ("pd", "full"))


def test_runs_that_are_missing_are_named(
    tmp_path: Path, config: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    told = rows(config, lambda way, number: (1.0, 1.0))
    cut = [row for row in told if not (row["row"] == "run" and row["way"] == "full")]
    with pytest.raises(AssertionError, match=r"trace chat, full: seeds \[0, 1\] are not measured"):
        verdicts(tmp_path, cut, capsys)
    with pytest.raises(AssertionError, match=r"raw.jsonl:1: no row of a comparison"):
        verdicts(tmp_path, [{"row": "other"}], capsys)
