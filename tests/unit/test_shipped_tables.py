"""The tables that come with the package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from eval.sweep.config import load_config
from eval.sweep.rows import read_runs
from eval.table.build import record_of
from eval.table.lint import Kind, findings
from eval.tiny_model import ModelSpec
from ppd.errors import TableError
from ppd.machine import Machine
from ppd.score import Weights
from ppd.table import Table
from router.config import table_files
from router.config.options import RouterConfig
from router.config.tables import make_policy

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tables").glob("*.json"))

# Sweep and raw rows of each; those of GPUs are measured on emulated clusters.
CPU = {"cpu-tiny-llama-1P1D": ("cpu", "sweep-cpu")}
EMULATED = {
    "deepseek-v3-h200-tp8-1P1D": ("emulated", "sweep-emulated-deepseek"),
    "llama-3.1-8b-h100-1P1D": ("emulated", "sweep-emulated-llama"),
    "qwen3-32b-h100-tp2-1P1D": ("emulated", "sweep-emulated-qwen"),
}


def read(name: str) -> Table:
    return Table.parse((ROOT / "tables" / f"{name}.json").read_bytes())


def test_each_is_of_rows_that_are_kept() -> None:
    assert [path.stem for path in TABLES] == sorted({**CPU, **EMULATED})


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_it_covers_real_traffic_and_names_its_origin(path: Path) -> None:
    record = Table.parse(path.read_bytes()).record
    assert record.axes.context_tokens[-1].high >= 131_072
    assert record.axes.new_tokens[-1].high >= 16_384
    assert len(record.provenance.commit) >= 7
    assert not record.provenance.commit.endswith("+"), "measured from a commit, not from edits"
    for cell in record.cells:
        assert min(cell.remote.ttft_ms.n, cell.local.ttft_ms.n) >= 20
        assert len(cell.seeds) >= 2


@pytest.mark.parametrize("name", [*CPU, *EMULATED])
def test_a_table_is_what_its_rows_give(name: str) -> None:
    sweep, rows = (CPU | EMULATED)[name]
    config, raw = load_config(ROOT / f"eval/sweep/{sweep}.toml"), ROOT / f"results/{rows}.jsonl"
    made = record_of(config, list(read_runs(config, raw)), raw)
    shipped = read(name).record
    assert made.cells == shipped.cells
    assert made.provenance.commit == shipped.provenance.commit


@pytest.mark.parametrize("name", EMULATED)
def test_a_table_of_a_gpu_has_no_doubtful_cell(name: str) -> None:
    table = read(name)
    found = {finding for finding in findings(table, Weights()) if finding.kind is not Kind.TIE}
    assert found == set()
    assert table.record.machine is not None
    assert table.record.provenance.hardware.startswith("emulated ")


def test_tables_of_gpus_differ_in_what_they_measured() -> None:
    cells = [read(name).record.cells for name in EMULATED]
    assert all(one != other for one, other in combinations(cells, 2))


def test_the_demo_model_finds_its_own(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(prefill=("http://h:1",), decode=("http://h:2",))
    with caplog.at_level(logging.INFO):
        _, found = make_policy(config, (f"/cache/{ModelSpec().name}",), "1P1D")
    assert found is not None
    assert found.table.record.model == ModelSpec().name
    assert f"decision table {found.path}" in caplog.text


MODEL = "org/Llama-3.1-8B"
H100 = Machine("NVIDIA H100 80GB HBM3", 1, 100.0)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put tables of a model on a machine into the folder of shipped ones."""
    monkeypatch.setattr(table_files, "SHIPPED", tmp_path)
    record = Table.parse((ROOT / "tables/cpu-tiny-llama-1P1D.json").read_bytes()).record

    def add(name: str, machine: Machine | None) -> Path:
        path = tmp_path / name
        table = msgspec.structs.replace(record, model="Llama-3.1-8B", machine=machine)
        path.write_bytes(msgspec.json.encode(table))
        return path

    return add


def chosen(
    machines: Collection[Machine],
    shape: str = "1P1D",
    model: str = MODEL,
    *,
    shipped_tables: bool = True,
) -> Path | None:
    config = RouterConfig(
        prefill=("http://h:1",), decode=("http://h:2",), shipped_tables=shipped_tables
    )
    _, found = make_policy(config, (model,), shape, machines)
    return None if found is None else found.path


@pytest.mark.parametrize(
    ("model", "machine", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", H100, "llama-3.1-8b-h100-1P1D"),
        ("deepseek-ai/DeepSeek-V3", Machine("NVIDIA H200", 8), "deepseek-v3-h200-tp8-1P1D"),
    ],
)
def test_workers_on_these_gpus_find_their_table(model: str, machine: Machine, name: str) -> None:
    assert chosen({machine}, model=model) == ROOT / "tables" / f"{name}.json"
    assert chosen({machine}, model=model, shape="2P2D") is None


def test_a_table_of_these_machines_is_chosen(shipped: Callable[..., Path]) -> None:
    shipped("h200.json", Machine("H200", 1, 100.0))
    path = shipped("h100.json", Machine("H100 SXM", 1, 100.0))
    assert chosen({H100}) == path
    assert chosen({H100}, shipped_tables=False) is None


@pytest.mark.parametrize(
    ("model", "of_it"),
    [
        ("/models/Llama-3.1-8B-Instruct", True),
        ("meta-llama/Meta-Llama-3.1-8B", True),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", False),
        ("Llama-3.1-70B", False),
    ],
)
def test_a_table_of_a_machine_is_of_all_models_of_one_shape(
    shipped: Callable[..., Path], model: str, of_it: bool
) -> None:
    shipped("h100.json", Machine("H100 SXM", 1, 100.0))
    assert (chosen({H100}, model=model) is not None) is of_it


@pytest.mark.parametrize(
    ("machines", "shape"),
    [
        (set(), "1P1D"),
        ({H100}, "2P2D"),
        ({H100}, ""),
        ({H100, Machine("NVIDIA H20", 1, 100.0)}, "1P1D"),
    ],
)
def test_no_table_of_other_machines_is_chosen(
    shipped: Callable[..., Path],
    machines: Collection[Machine],
    shape: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shipped("h100.json", Machine("H100 SXM", 1, 100.0))
    with caplog.at_level(logging.INFO):
        assert chosen(machines, shape) is None
    assert "h100.json: it is of 1P1D, H100 SXM TP 1, 100 Gb/s; this cluster is of" in caplog.text
    assert "no decision table" in caplog.text


def test_of_several_that_fit_none_is_chosen(
    shipped: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The link is not known, and it is what they differ in."""
    for gbps in (25.0, 100.0):
        shipped(f"h100-{gbps:g}.json", Machine("H100 SXM", 1, gbps))
    with caplog.at_level(logging.INFO):
        assert chosen({Machine(H100.gpu)}) is None
    assert caplog.text.count("several are of 1P1D") == 2
    assert chosen({H100}) is not None


def test_of_several_for_any_machine_the_operator_must_choose(shipped: Callable[..., Path]) -> None:
    for name in ("one.json", "other.json"):
        shipped(name, None)
    with pytest.raises(TableError, match="several shipped tables are for"):
        chosen({H100})
