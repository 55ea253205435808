"""The tables that come with the package."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from eval.sweep.config import load_config
from eval.sweep.rows import read_runs
from eval.table.build import record_of
from eval.tiny_model import ModelSpec
from ppd.table import Table
from router.config.options import RouterConfig
from router.config.tables import make_policy

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tables").glob("*.json"))


def test_there_is_one() -> None:
    assert TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_it_covers_real_traffic_and_names_its_origin(path: Path) -> None:
    record = Table.parse(path.read_bytes()).record
    assert record.axes.context_tokens[-1].high >= 131_072
    assert record.axes.new_tokens[-1].high >= 16_384
    assert len(record.provenance.commit) >= 7
    assert not record.provenance.commit.endswith("+"), "measured from a commit, not from edits"
    for cell in record.cells:
        assert min(cell.remote.ttft_ms.n, cell.local.ttft_ms.n) >= 20
        assert len(cell.seeds) >= 3


def test_the_cpu_table_is_what_its_rows_give() -> None:
    config, raw = load_config(ROOT / "eval/sweep/cpu.toml"), ROOT / "results/sweep-cpu.jsonl"
    made = record_of(config, list(read_runs(config, raw)), raw)
    shipped = Table.parse((ROOT / "tables/cpu-tiny-llama-1P1D.json").read_bytes()).record
    assert made.cells == shipped.cells
    assert made.provenance.commit == shipped.provenance.commit


def test_the_demo_model_finds_its_own(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(prefill=("http://h:1",), decode=("http://h:2",))
    with caplog.at_level(logging.INFO):
        _, found = make_policy(config, (f"/cache/{ModelSpec().name}",), "1P1D")
    assert found is not None
    assert found.table.record.model == ModelSpec().name
    assert f"decision table {found.path}" in caplog.text
