"""``ppd-eval simulate map`` and its figure."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from eval.cli import main
from eval.report.route_map import route_map
from eval.simulation.machine import Machine
from eval.simulation.route_map import rows_of
from eval.sweep.config import Adaptive, SweepConfig
from ppd.errors import ConfigError
from ppd.table_file import Axes, Bin

from .test_report import route_row

EXAMPLE = Path(__file__).parents[2] / "eval" / "sweep" / "route-map.toml"
CONFIG = SweepConfig(
    shape="1P1D",
    turns=3,
    conversations=6,
    quiet_conversations=1,
    think_s=2.0,
    seeds=(0,),
    axes=Axes(
        (Bin(0, 4096, 2048), Bin(4096, 20480, 8192)),
        (Bin(0, 128, 64), Bin(128, 768, 384), Bin(768, 3072, 1536)),
        (Bin(0, 256, 32),),
        (Bin(0, 8, 1.0),),
    ),
)
CELLS = 6


def test_a_slower_link_helps_the_local_route() -> None:
    fast, slow = (rows_of(CONFIG, Machine("llama-3.1-8b-h100-tp1", gbps)) for gbps in (400.0, 5.0))
    assert len(fast) == len(slow) == CELLS
    for one, other in zip(fast, slow, strict=True):
        for name in ("context_tokens", "new_tokens", "output_tokens", "qps"):
            assert one[name] == other[name]
        assert other["remote_ttft_ms"] > one["remote_ttft_ms"]
        assert other["remote_ttft_p90_ms"] >= other["remote_ttft_ms"]
    assert [row["new_tokens"] for row in fast[:3]] == [64, 384, 1536]
    assert {row["link_gbps"] for row in slow} == {5.0}
    assert {row["choice"] for row in slow} <= {"local", "tie"}


def test_cells_that_cannot_be_served_are_left_out() -> None:
    axes = msgspec.structs.replace(
        CONFIG.axes,
        context_tokens=(*CONFIG.axes.context_tokens, Bin(20480, 131072, 65536)),
        qps=(Bin(0, 1.5, 1.0), Bin(1.5, 400, 2.0)),
    )
    config = msgspec.structs.replace(CONFIG, axes=axes, conversations=200, adaptive=Adaptive())
    rows = rows_of(config, Machine("llama-3.1-8b-l40s-tp1", 100.0))
    assert 8 <= len(rows) < 18


def test_the_command_writes_a_row_for_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "map.toml"
    shorter = ("conversations = 60", "conversations = 20")
    config.write_text(EXAMPLE.read_text().replace(*shorter).replace("[0, 1, 2]", "[0]"))
    out = tmp_path / "route-map.jsonl"
    profiles = ["llama-3.1-8b-h100-tp1", "deepseek-v3-h200-tp8"]
    argv = ["simulate", "map", str(config), "--profiles", *profiles, "--links-gbps", "25", "100"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--out", str(out)])
    assert ended.value.code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["cells"] == len(rows) == told["local"] + told["remote"] + told["tie"]
    assert {(row["profile"], row["link_gbps"]) for row in rows} == {
        (profile, gbps) for profile in profiles for gbps in (25.0, 100.0)
    }
    found = route_map(tmp_path)
    assert found.figure is not None
    assert found.figure().startswith("<svg")
    assert [row[:2] for row in found.tables[0].rows] == [
        (f"`{profile}`", gbps) for profile in profiles for gbps in ("25", "100")
    ]


def test_a_profile_that_is_none_is_named_before_anything_is_simulated() -> None:
    argv = ["simulate", "map", str(EXAMPLE), "--profiles", "llama-3.1-8b-h100-tp1", "h900"]
    with pytest.raises(SystemExit, match="h900"):
        main(argv)


def test_the_table_under_the_figure_has_ratios_and_choices(tmp_path: Path) -> None:
    rows = [
        route_row(25.0, 64),
        route_row(25.0, 384, local_ttft_ms=60.0, choice="remote"),
        route_row(25.0, 1536, local_ttft_ms=20.0, choice="tie"),
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "route-map.jsonl").write_text(lines)
    (table,) = route_map(tmp_path).tables
    ratios = ("0.50 (0.25 to 1.50)", "0.50 (0.50 to 0.50)")
    assert table.rows == [("`a-gpu`", "25", "3", *ratios, "1", "1", "1")]


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    row = route_row(25.0, 64, choice="both")
    (tmp_path / "route-map.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"route-map.jsonl:1: Invalid enum value 'both'"):
        route_map(tmp_path)
