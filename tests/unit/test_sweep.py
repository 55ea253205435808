"""The sweep's plans and raw rows, and the table that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.sweep.config import Place, Run, SweepConfig, load_config, plan
from eval.sweep.rows import read_runs
from eval.table.build import build
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.table import Table

TOML = """
shape = "1P1D"
turns = 3
conversations = 20
quiet_conversations = 2
think_s = 0.5
seeds = [0, 1]
worker_flags = []
[axes]
context_tokens = [{ low = 0, high = 2048, at = 1000 }]
new_tokens = [{ low = 0, high = 96, at = 32 }, { low = 96, high = 2048, at = 512 }]
output_tokens = [{ low = 0, high = 64, at = 16 }]
qps = [{ low = 0, high = 1.5, at = 1 }, { low = 1.5, high = 9, at = 4 }]
"""


@pytest.fixture
def config(tmp_path: Path) -> SweepConfig:
    return config_of(tmp_path, TOML)


def config_of(tmp_path: Path, text: str) -> SweepConfig:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return load_config(path)


def test_later_turns_meet_the_cells_context(config: SweepConfig) -> None:
    for workload in config.workloads():
        first, *later = config.contexts(workload)
        assert sum(later) / len(later) == 1000
        assert later[0] == first + 16
        conversation = plan(config, Place(workload, 0), 0)[0]
        context, sizes = 0, []
        for exchange in conversation.turns:
            sizes.append(context)
            context += exchange.new_tokens + exchange.output_tokens
        assert sizes == [0, *later]


def test_a_plan_is_its_places_and_its_seeds(config: SweepConfig) -> None:
    place = Place((0, 0, 0), 1)
    assert plan(config, place, 0) == plan(config, place, 0)
    assert plan(config, place, 0) != plan(config, place, 1)


def test_conversations_arrive_at_the_cells_rate(config: SweepConfig) -> None:
    starts_s = [one.starts_at_s for one in plan(config, Place((0, 0, 0), 1), 0)]
    assert starts_s == sorted(starts_s)
    assert len(starts_s) == 20
    assert 10 < starts_s[-1] < 20 * 3 / 4
    quiet = plan(config, Place((0, 0, 0), None), 0)
    assert [one.starts_at_s for one in quiet] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("at = 512", "at = 1900", r"the first turn would have 26 tokens \(at least 64\)"),
        ("at = 1000", "at = 2000", r"a context of \[1736, 2264\], which must stay in \[0, 2048\)"),
        ("turns = 3", "turns = 1", "turns must be at least 2"),
        ("seeds = [0, 1]", "seeds = []", "seeds must name one"),
        ('"1P1D"', '"1P1R"', "shape must be as 1P1D, 1P1D1R or 2R, 1 to 99 of each, got 1P1R"),
        ("turns = 3", 'turns = 3\npolicies = ["pd"]', "policies must have full"),
        ("turns = 3", 'turns = 3\npolicies = ["pd", "full", "some"]', "no such policy: 'some'"),
        ("turns = 3", 'turns = 3\npolicies = ["pd", "full", "replica"]', "has no routes"),
        ('"1P1D"', '""', "shape must be"),
        ('"1P1D"', '"2R"', r"of replicas alone policies must be \[\"replica\"\], got \['pd'"),
        ("turns = 3", "turns = 3\nclusters_here = 0", "clusters_here must be 1 to 64, got 0"),
        (
            "[axes]",
            "[adaptive]\nweightings = [{ throughput = 1.0 }]\n[axes]",
            "adaptive.weightings: the choice of cells weighs TTFT and TPOT",
        ),
        ("[axes]", "[adaptive]\nwrong = 0.7\n[axes]", "adaptive.wrong must be above 0 and at most"),
        (
            "[axes]",
            '[[clusters]]\nprefill = ["http://a"]\ndecode = []\n[axes]',
            r"clusters\[0\] must be 1P1D, the shape, got 1P0D0R; clusters need hardware",
        ),
        (
            "[axes]",
            '[[clusters]]\nprefill = ["http://a"]\ndecode = ["http://a"]\n[axes]',
            "a worker stands twice",
        ),
        ("turns = 3", "turn = 3", "turn"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(tmp_path, TOML.replace(old, new))


def test_a_note_changes_nothing_that_was_measured(tmp_path: Path) -> None:
    plain = config_of(tmp_path, TOML)
    noted = config_of(tmp_path, 'note = "short points"\n' + TOML)
    assert (noted.note, noted.digest) == ("short points", plain.digest)


def rows_of(config: SweepConfig, run: Run, **changes: Any) -> list[dict[str, Any]]:
    """A run in which local saves half of TTFT, and each seed adds a tenth to everything."""
    place = run.place
    ttft_ms = (100.0 if run.route is Route.REMOTE else 50.0) * (1 + 0.1 * run.seed)
    ttft_ms *= 1.0 if place.qps is None else 2.0
    turns = []
    for number in range(4):
        first = (700, 500, 900)[place.workload[1]]
        later = round(config.axes.new_tokens[place.workload[1]].at)
        for turn, new in ((1, first), (2, later)):
            took = "remote" if turn == 1 else str(run.route)
            turns.append(
                {
                    "row": "turn", "conversation": number, "turn": turn,
                    "sent_at_s": number + turn / 10, "new_tokens": new, "output_tokens": 11,
                    "route": took, "ttft_ms": ttft_ms + 0.1 * new, "tpot_ms": 10.0, "error": "",
                    "e2e_ms": 900.0, **changes,
                }
            )  # fmt: skip
    summary = {
        "row": "run", "config": config.digest, "workload": place.workload, "qps": place.qps,
        "policy": run.policy, "seed": run.seed, "turns": len(turns), "failed": 0, "strayed": 0,
        "wall_s": 4.0, "model": "m", "engine": "e", "plugin": "p", "commit": "c",
        "hardware": "h", "at": "2026",
    }  # fmt: skip
    return [*turns, summary]


def write_all(config: SweepConfig, path: Path) -> None:
    rows = [
        row
        for seed in config.seeds
        for workload in config.workloads()
        for qps in (None, 0, 1)
        for policy in ("pd", "full")
        for row in rows_of(config, Run(Place(workload, qps), policy, seed))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_table_is_what_was_measured(
    config: SweepConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw.jsonl", tmp_path / "table.json"
    write_all(config, raw)
    told = build(config, raw, out)
    table = Table.parse(out.read_bytes())
    assert told == {
        "cells": 4, "table": str(out), "digest": table.record.digest, "local_cells": 4,
        "remote_cells": 0, "noise_cells": 0, "measured_cells": 4,
    }  # fmt: skip
    cell = table.find(1000, 32, 16, 1.0)
    assert cell is not None
    # Seeds give 203.2 and 223.2 remote, 103.2 and 113.2 local.
    assert cell.remote.ttft_ms == pytest.approx(213.2)
    assert cell.local.ttft_ms == pytest.approx(108.2)
    assert cell.quiet_remote_ms == pytest.approx(108.2)
    assert cell.running == pytest.approx(8 * 0.1 / 4)
    record = table.record.cells[0]
    assert record.remote.ttft_ms.spread == pytest.approx(20.0)
    assert record.remote.ttft_ms.n == 8
    assert record.local.qps == pytest.approx(8 / 3.1, rel=1e-3)
    # 8 replies of 11 tokens between 0.1 and 4.1 s.
    assert record.local.tokens_per_s == (22.0, 22.0)
    assert table.record.append_ms_per_token == pytest.approx(0.1)
    assert "remote: 2.58 qps arrived, outside its bin" in capsys.readouterr().out


def test_of_a_hybrid_what_lives_on_decode_workers_counts(
    config: SweepConfig, tmp_path: Path
) -> None:
    """Two replicas beside one decode worker; their conversations take ten times as long."""
    hybrid = config_of(tmp_path, TOML.replace('"1P1D"', '"1P1D2R"'))
    assert (hybrid.workers, hybrid.homes) == ((1, 1, 2), 3)
    assert len(plan(hybrid, Place((0, 0, 0), 1), 0)) == 3 * len(
        plan(config, Place((0, 0, 0), 1), 0)
    )
    raw, out = tmp_path / "raw.jsonl", tmp_path / "table.json"
    write_all(hybrid, raw)
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    for row in rows:
        if row["row"] == "turn" and row["conversation"] < 2:
            row |= {"route": "replica", "ttft_ms": 10 * row["ttft_ms"]}
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(hybrid, raw, out)
    record = Table.parse(out.read_bytes()).record
    assert record.shape == "1P1D2R"
    assert record.cells[0].remote.ttft_ms.n == 4
    assert record.cells[0].remote.ttft_ms.median == pytest.approx(213.2)
    assert record.cells[0].remote.qps == pytest.approx(8 / 3.1 / 3, rel=1e-3)
    for row in rows:
        if row["row"] == "turn" and row["turn"] == 2 and row["route"] == "remote":
            row |= {"route": "replica"}
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ConfigError, match=r"quiet remote: no later turn was measured, more conversations"
    ):
        build(hybrid, raw, out)


def test_replicas_alone_are_measured_and_make_no_table(tmp_path: Path) -> None:
    made = TOML.replace('"1P1D"', '"4R"').replace("turns = 3", 'turns = 3\npolicies = ["replica"]')
    config = config_of(tmp_path, made)
    assert config.workers == (0, 0, 4)
    place = Place((0, 0, 0), 1)
    assert len(plan(config, place, 0)) == 4 * config.conversations
    assert Run(place, "replica", 0).route is None
    with pytest.raises(ConfigError, match="4R has no routes to compare"):
        build(config, tmp_path / "raw.jsonl", tmp_path / "t.json")


def test_only_whole_runs_of_this_sweep_count(config: SweepConfig, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    write_all(config, raw)
    whole = len(list(read_runs(config, raw)))
    assert whole == 2 * 2 * 3 * 2
    raw.write_bytes(raw.read_bytes()[:-30])  # killed in mid-write
    assert len(list(read_runs(config, raw))) == whole - 1
    other = config_of(tmp_path, TOML.replace("think_s = 0.5", "think_s = 0.6"))
    assert list(read_runs(other, raw)) == []
    more = config_of(tmp_path, TOML.replace("[0, 1]", "[0, 1, 2]"))
    assert len(list(read_runs(more, raw))) == whole - 1, "seeds can be added"
    with pytest.raises(ConfigError, match=r"seeds \[2\] are missing"):
        build(more, raw, tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"must hold runs of .*, this sweep"):
        build(other, raw, tmp_path / "t.json")


def test_a_median_of_survivors_is_refused(config: SweepConfig, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    write_all(config, raw)
    raw.write_text(raw.read_text().replace('"strayed": 0', '"strayed": 3'))
    with pytest.raises(ConfigError, match="turns failed, or took another route"):
        build(config, raw, tmp_path / "t.json")


def test_what_is_no_sweep_is_refused(config: SweepConfig, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"row": "other"}\n')
    with pytest.raises(ConfigError, match=r"raw.jsonl:1: no row of a sweep"):
        list(read_runs(config, raw))
