"""Tables of emulated clusters: their sweeps side by side, and windows of traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from eval.emulation.sweeping import drive, where_measured
from eval.report.areas import emulated_paper, emulated_windows, gpu_tables
from eval.report.results import Results
from eval.simulation.machine import Machine
from eval.sweep.config import Run, SweepConfig
from eval.sweep.rows import RunResult, Writer

from . import test_emulated_sweep
from .test_emulated_sweep import sample

# As read from a file: with bounds that are floats.
CONFIG = msgspec.convert(msgspec.to_builtins(test_emulated_sweep.CONFIG), SweepConfig)

ORIGIN = {"commit": "c0ffee123456", "hardware": "2 cores", "at": "2026-11-21T20:00:00+00:00"}


def test_tables_of_gpus_stand_side_by_side(tmp_path: Path) -> None:
    """The local route of the sample takes half of the remote one's time for new tokens."""
    for file, profile in (
        ("llama", "llama-3.1-8b-h100-tp1"),
        ("qwen", "qwen3-32b-h100-tp2"),
        ("deepseek", "deepseek-v3-h200-tp8"),
    ):
        writer = Writer(
            CONFIG,
            tmp_path / f"sweep-emulated-{file}.jsonl",
            where_measured(Machine(profile), 15.0),
        )
        writer.begin()

        def measure(run: Run, _tries: int, writer: Writer = writer) -> RunResult:
            return writer.write(run, [sample(run, turn) for turn in (1, 2)], 4.0, "emulated")

        drive(CONFIG, {}, measure)
    found = gpu_tables.tables(Results(tmp_path)).text.splitlines()
    it = "| DeepSeek-V3 | `deepseek-v3-h200-tp8`, `device` | 100 | 15 | 2 | 2 |"
    assert found[-1] == f"{it} 2 / 0 / 0 | 2 / 0 / 0 | 2 / 0 / 0 |"
    cells = gpu_tables.cells(Results(tmp_path)).text.splitlines()
    costs = "30.6±0 / 17.8±0 | 7 / 7 | local"
    assert cells[-1] == f"| 1,024 | 256 | 8 | 4 | {costs} | {costs} | {costs} |"


def test_a_point_of_the_paper_stands_beside_its_measurement(tmp_path: Path) -> None:
    """Of ``1P_3D`` the authors have no answer."""
    about = {
        "row": "comparison", "workload": "paper:large_big_paste", "conversations": 40, "qps": 4.0,
        "profile": "llama", "slow_motion": 12.0, "link_gbps": 400.0,
    }  # fmt: skip
    rows = [
        {**about, "shape": shape, "policy": policy, "metric": metric, "emulated": 30.0,
         "simulated": 29.0, **ORIGIN}
        for shape, policy in (("2P2D", "full"), ("1P3D", "pd"), ("4R", "replica"))
        for metric in ("t1_ttft_p50_ms", "t2_ttft_p50_ms", "tpot_p50_ms")
    ]  # fmt: skip
    path = tmp_path / "emulation-paper-simulator.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    emulated = {**rows[0], "row": "run", **ORIGIN}
    (tmp_path / "emulation-paper.jsonl").write_text(json.dumps(emulated) + "\n")
    ours = "29 / 30"
    block = emulated_paper.points(Results(tmp_path))
    assert "emulation-paper.jsonl" in block.markdown()
    found = block.text.splitlines()[-3:]
    assert found == [
        f"| `2P_2pD` | 132 / {ours} | 90.1 / {ours} | 10 / {ours} |",
        f"| `1P_3D` | - / {ours} | - / {ours} | - / {ours} |",
        f"| `4R` | 66.3 / {ours} | 82.5 / {ours} | 9.11 / {ours} |",
    ]


def window(way: str, ttft_ms: float, gbps: float) -> list[dict[str, Any]]:
    where: dict[str, Any] = {"trace": "chat", "seed": 4, "way": way}
    turns = [
        {
            "row": "turn", **where, "conversation": number, "turn": 2, "error": "",
            "ttft_ms": ttft_ms + number, "tpot_ms": 7.0,
        }
        for number in range(20)
    ]  # fmt: skip
    run = {
        "row": "run", **where, **ORIGIN, "planned": 20, "failed": 0, "routes": {"local": 5},
        "cached_tokens": 7, "kv_bytes_moved": 3_000_000_000, "link_gbps": gbps,
    }  # fmt: skip
    return [*turns, run]


def test_windows_name_their_link_and_who_costs_less(tmp_path: Path) -> None:
    for name, gbps, ours in (("", 100.0, 50.0), ("-25gbps", 25.0, 200.0)):
        rows = (
            window("pd", 100.0, gbps) + window("full", 90.0, gbps) + window("ppd 1:1", ours, gbps)
        )
        path = tmp_path / f"compare-emulated{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = Results(tmp_path)
    ways = emulated_windows.ways(results).text
    assert "| chat, 25 Gb/s | `full` | 99.5 / 107 | 7.00 / 7.00 | 25% | 3.0 | 0 |" in ways
    found = emulated_windows.verdicts(results).text.splitlines()
    assert "| chat, 100 Gb/s (20 later turns) | p50 | 1.54 | 1.91 (`full`) |" in found[-4]
    assert found[-4].endswith("| lower |")
    assert found[-1].endswith("| higher |")
