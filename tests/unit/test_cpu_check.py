"""The simulator against what was measured on the CPU cluster: the errors that docs state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.simulation import cpu_check
from eval.sweep.config import load_config
from ppd.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "eval" / "sweep" / "cpu.toml"


def test_the_cpu_cluster_is_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    config = load_config(CONFIG)
    assert cpu_check.run(config, ROOT / "results" / "sweep-cpu.jsonl", paced=True, out=out) == 0
    summary = json.loads(capsys.readouterr().out)
    for part in ("quiet", "remote", "local"):
        assert summary[part]["ttft_ms"]["median"] < 15
        assert summary[part]["tpot_ms"]["median"] < 15
    assert len(out.read_text().splitlines()) == summary["cells"] + 1


def test_half_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a whole sweep"):
        cpu_check.run(load_config(CONFIG), tmp_path / "none.jsonl", paced=False, out=None)
