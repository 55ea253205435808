"""``ppd-eval table``: build, show, lint and diff."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eval import cli
from eval.sweep.config import Place, Run, SweepConfig
from ppd.table import Table
from ppd.table_file import Axes, Bin, CellRecord, Measured, Provenance, Statistic, TableRecord

from .fixtures import costs_of, table_record
from .test_sweep import TOML, config_of, rows_of
from .test_sweep_choice import TOML as GRID
from .test_sweep_choice import costs

AXES = Axes(
    context_tokens=(Bin(0, 2048, 1024), Bin(2048, 8192, 4096)),
    new_tokens=(Bin(0, 64, 32), Bin(64, 1024, 512)),
    output_tokens=(Bin(0, 128, 64),),
    qps=(Bin(0, 2, 1), Bin(2, 8, 4)),
)
Told = Callable[..., dict[str, Any]]


def measured(
    ttft_ms: float,
    tpot_ms: float,
    spread: float = 0.01,
    n: int = 40,
    of_seeds: tuple[float, ...] = (),
) -> Measured:
    """``of_seeds``: medians of the seeds, as shares of that of all turns."""
    ttft, tpot = (
        Statistic(one, 2 * one, n, spread * one, tuple(one * share for share in of_seeds))
        for one in (ttft_ms, tpot_ms)
    )
    return Measured(ttft, tpot, quiet_ttft_ms=ttft_ms / 2, running=1.0, qps=1.0)


def record(**changes: Any) -> TableRecord:
    """Small inputs go local, large ones remote, at even weights."""
    cells = []
    for c in (0, 1):
        for n in (0, 1):
            for q in (0, 1):
                ttft_ms = 100.0 * (1 + c) * (1 + n) * (1 + q)
                tpot_ms = 5.0 + c + q
                remote = measured(ttft_ms, tpot_ms)
                local = measured(ttft_ms * (0.5, 0.9)[n], tpot_ms * (1.1, 1.5)[n])
                cells.append(CellRecord((c, n, 0, q), remote, local, (0, 1, 2)))
    whole = TableRecord(
        version=1,
        model="m",
        shape="1P1D",
        provenance=Provenance("h", "e", "p", "c", "2026", {}),
        prefill_ms_per_token=0.1,
        append_ms_per_token=0.1,
        axes=AXES,
        cells=tuple(cells),
    )
    return msgspec.structs.replace(whole, **changes)


def with_cell(index: int, **changes: Any) -> TableRecord:
    whole = record()
    cells = list(whole.cells)
    cells[index] = msgspec.structs.replace(cells[index], **changes)
    return msgspec.structs.replace(whole, cells=tuple(cells))


def write(path: Path, told: TableRecord) -> str:
    path.write_bytes(msgspec.json.encode(told))
    return str(path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    def run(*argv: str) -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["table", *argv])
        assert isinstance(ended.value.code, int), ended.value.code
        return ended.value.code, capsys.readouterr().out.splitlines()

    return run


Command = Callable[..., tuple[int, list[str]]]


def test_a_sound_table_has_no_findings(tmp_path: Path, command: Command) -> None:
    code, lines = command("lint", write(tmp_path / "t.json", record()))
    assert code == 0
    assert json.loads(lines[-1]) == {
        "table": str(tmp_path / "t.json"), "digest": record().digest, "unmeasured": 0, "far": 0,
        "noise": 0, "falls": 0, "tie": 0, "local_cells": 4,
        "remote_cells": 4, "noise_cells": 0, "measured_cells": 8,
    }  # fmt: skip


def test_a_digest_names_what_was_measured() -> None:
    provenance = msgspec.structs.replace(record().provenance, commit="another")
    assert record(provenance=provenance).digest == record().digest
    assert record(append_ms_per_token=0.5).digest != record().digest


@pytest.mark.parametrize(
    ("told", "kind", "named"),
    [
        (
            with_cell(0, local=measured(95.0, 5.0, spread=0.9)),
            "noise",
            "context=[0,2048) new=[0,64) output=[0,128) qps=[0,2): score +0.050",
        ),
        (
            with_cell(3, seeds=(), remote=measured(1, 1, 0, n=0), local=measured(1, 1, 0, n=0)),
            "unmeasured",
            "context=[0,2048) new=[64,1024)",
        ),
        (
            with_cell(7, remote=measured(200, 8.0)),
            "falls",
            "remote ttft_ms falls from 400 to 200 from [0, 1, 0, 1] to [1, 1, 0, 1], along context",
        ),
        (
            record(
                axes=msgspec.structs.replace(AXES, qps=(Bin(0, 2, 1), Bin(2, 80, 4))),
            ),
            "far",
            "qps [2, 80): measured at 4, holds to 80",
        ),
    ],
)
def test_lint_names_what_is_doubtful(
    tmp_path: Path, command: Command, told: TableRecord, kind: str, named: str
) -> None:
    code, lines = command("lint", write(tmp_path / "t.json", told))
    assert code == 1
    assert any(line.startswith(kind) and named in line for line in lines), lines
    assert json.loads(lines[-1])[kind] >= 1


def test_lint_compares_seed_by_seed(tmp_path: Path, command: Command) -> None:
    """Seeds may differ by much, if they differ alike on both routes."""
    seeds = (0.6, 1.0, 1.6)
    remote, local = measured(100.0, 5.0, 1.0, 40, seeds), measured(60.0, 5.0, 1.0, 40, seeds)
    told = with_cell(0, remote=remote, local=local)
    assert command("lint", write(tmp_path / "t.json", told))[0] == 0
    without = with_cell(0, remote=measured(100.0, 5.0, 1.0), local=measured(60.0, 5.0, 1.0))
    assert command("lint", write(tmp_path / "t.json", without))[0] == 1


def test_lint_names_a_route_that_seeds_do_not_choose(tmp_path: Path, command: Command) -> None:
    """With each seed remote is better, but not by the medians of all turns."""
    local = measured(60.0, 5.0, 1.0, 40, (2.0, 2.1, 2.2))
    told = with_cell(0, remote=measured(100.0, 5.0, 1.0, 40, (0.6, 0.6, 0.6)), local=local)
    code, lines = command("lint", write(tmp_path / "t.json", told))
    assert code == 1
    assert lines[0].startswith("noise       context=[0,2048) new=[0,64)")


def test_a_cost_may_fall_with_the_load(tmp_path: Path, command: Command) -> None:
    """Long first turns let fewer later ones arrive, so these have less to wait for."""
    cheaper = measured(200.0, 7.0)
    told = with_cell(7, remote=cheaper)
    assert command("lint", write(tmp_path / "t.json", told))[0] == 1
    told = with_cell(7, remote=msgspec.structs.replace(cheaper, qps=0.8))
    assert command("lint", write(tmp_path / "t.json", told))[0] == 0


def test_a_cost_falls_if_it_does_so_by_its_seeds(tmp_path: Path, command: Command) -> None:
    """A median of all turns may be between two kinds of them."""
    alike = measured(200.0, 7.0, 0.01, 40, (2.0, 2.0, 2.0))
    told = with_cell(7, remote=alike)
    cells = list(told.cells)
    cells[3] = msgspec.structs.replace(cells[3], remote=measured(400.0, 6.0, 0.01, 40, (1.0,) * 3))
    cells[5] = msgspec.structs.replace(cells[5], remote=measured(400.0, 7.0, 0.01, 40, (1.0,) * 3))
    told = msgspec.structs.replace(told, cells=tuple(cells))
    _, lines = command("lint", write(tmp_path / "t.json", told))
    assert not any(line.startswith("falls") and "along context" in line for line in lines), lines


def test_a_tie_is_no_fault(tmp_path: Path, command: Command) -> None:
    told = with_cell(0, local=measured(95.0, 5.0, spread=0.2))
    code, lines = command("lint", write(tmp_path / "t.json", told))
    assert code == 0
    assert lines[0].startswith("tie         context=[0,2048) new=[0,64) output=[0,128)")
    assert json.loads(lines[-1])["tie"] == json.loads(lines[-1])["noise_cells"] == 1


def test_show_draws_what_is_chosen(tmp_path: Path, command: Command) -> None:
    file, png = write(tmp_path / "t.json", record()), tmp_path / "t.png"
    code, lines = command("show", file, "--cells", "--png", str(png))
    assert code == 0
    rows = [line.split() for line in lines if line.strip().startswith(("1k", "4k"))]
    assert rows[0] == ["1k", "32", "+0.40", "+0.40"]
    assert rows[1] == ["1k", "512", "-0.40", "-0.40"]
    assert sum(line.endswith("  local") for line in lines) == 4
    assert png.read_bytes().startswith(b"\x89PNG")


def test_throughput_is_weighed_where_it_is_known(tmp_path: Path, command: Command) -> None:
    told = table_record(costs_of, rates=(400.0, 500.0))
    file, plain = write(tmp_path / "t.json", told), write(tmp_path / "plain.json", record())
    weights = ("--w-ttft", "0", "--w-tpot", "0", "--w-throughput", "2")
    lines = command("show", file, "--cells", *weights)[1]
    assert sum("   400 >    500" in line and "  25%    0.50  " in line for line in lines) == 8
    assert json.loads(command("lint", file, *weights)[1][-1])["local_cells"] == 8
    slower = write(tmp_path / "slower.json", table_record(costs_of, rates=(400.0, 250.0)))
    code, lines = command("diff", file, slower, *weights)
    assert (code, json.loads(lines[-1])["local_throughput_ratio"]) == (1, 0.5)
    for argv in (("show", plain), ("lint", plain), ("diff", file, plain)):
        with pytest.raises(SystemExit, match="it has no throughput"):
            cli.main(["table", *argv, *weights])


def test_show_prints_the_provenance_of_a_sweep(tmp_path: Path, command: Command) -> None:
    told = record()
    noted = msgspec.structs.replace(told.provenance, sweep={"note": "short points"})
    for provenance, lines_more in ((told.provenance, []), (noted, ["note: short points"])):
        file = write(tmp_path / "t.json", msgspec.structs.replace(told, provenance=provenance))
        assert [one for one in command("show", file)[1] if one.startswith("note:")] == lines_more


def test_diff_names_cells_that_turned(tmp_path: Path, command: Command) -> None:
    old, new = write(tmp_path / "a.json", record()), tmp_path / "b.json"
    assert command("diff", old, old)[0] == 0
    turned = with_cell(0, local=measured(50.0, 9.0))
    code, lines = command("diff", old, write(new, turned))
    assert code == 1
    assert lines[0].strip().startswith("now remote  context=[0,2048) new=[0,64)")
    assert json.loads(lines[-1])["flipped"] == 1
    wider = msgspec.structs.replace(AXES, qps=(Bin(0, 2, 1), Bin(2, 80, 20)))
    code, lines = command("diff", old, write(new, record(axes=wider)))
    assert json.loads(lines[-1])["not_in_old"] == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "t.json: cannot be read: No such file"),
        ("{}", "t.json: it is no decision table"),
        ("\xff", "t.json: it is no decision table"),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / "t.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit, match=named):
        cli.main(["table", "show", str(file)])


def sweep_rows(config: SweepConfig, run: Run) -> list[dict[str, Any]]:
    """A run of the smooth world in which adaptive sweeps are tested."""
    ttft_ms, tpot_ms = costs(run, 0.03)
    *turns, summary = rows_of(config, run)
    for turn in turns:
        turn |= {"ttft_ms": ttft_ms + 0.01 * turn["new_tokens"], "tpot_ms": tpot_ms}
    return [*turns, summary]


def test_cells_of_a_whole_grid_are_all_measured(tmp_path: Path, command: Command) -> None:
    adaptive = "[adaptive]\nstart = 0.2"
    config = config_of(tmp_path, GRID.format(adaptive=adaptive))
    runs = [
        Run(Place(workload, qps), policy, seed)
        for seed in config.seeds
        for workload in config.workloads()
        for qps in (None, 0, 1, 2)
        for policy in config.policies
    ]
    raw, built = tmp_path / "raw.jsonl", tmp_path / "t.json"
    rows = [row for run in runs for row in sweep_rows(config, run)]
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command("build", str(tmp_path / "sweep.toml"), str(raw), "--out", str(built))
    table = Table.parse(built.read_bytes())
    assert len(table.record.cells) == 54
    assert all(one.measured for one in table.record.cells)


def test_a_cell_may_have_more_seeds(tmp_path: Path, command: Command) -> None:
    """A seed with which one route is missing does not count."""
    config = config_of(tmp_path, GRID.format(adaptive="more_seeds = [3, 4]"))
    place, only_local = Place((0, 0, 0), 1), Run(Place((0, 0, 0), 1), "full", 4)
    places = [Place(workload, qps) for workload in config.workloads() for qps in (None, 0, 1, 2)]
    runs = [
        Run(one, policy, seed)
        for one in places
        for policy in config.policies
        for seed in config.seeds
    ]
    runs += [*(Run(place, policy, 3) for policy in config.policies), only_local]
    raw, built = tmp_path / "raw.jsonl", tmp_path / "t.json"
    rows = [row for run in runs for row in sweep_rows(config, run)]
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command("build", str(tmp_path / "sweep.toml"), str(raw), "--out", str(built))[0] == 0
    seeds = {cell.bins: cell.seeds for cell in Table.parse(built.read_bytes()).record.cells}
    assert seeds.pop((0, 0, 0, 1)) == (0, 1, 2, 3)
    assert set(seeds.values()) == {(0, 1, 2)}


def test_cells_left_out_are_filled_and_marked(tmp_path: Path, command: Command) -> None:
    config = config_of(tmp_path, GRID.format(adaptive="[adaptive]"))
    raw, built = tmp_path / "raw.jsonl", tmp_path / "t.json"
    lines = []
    for workload in config.workloads():
        for qps in (None, 0, 2):  # the rate in the middle was never measured
            for policy in config.policies:
                lines += sweep_rows(config, Run(Place(workload, qps), policy, 0))
    raw.write_text("".join(json.dumps(row) + "\n" for row in lines))
    code, told = command("build", str(tmp_path / "sweep.toml"), str(raw), "--out", str(built))
    assert code == 0
    assert json.loads(told[-1])["measured_cells"] == 36
    table = Table.parse(built.read_bytes())
    for cell in table.record.cells:
        assert cell.measured is (cell.bins[3] != 1)
        truth = costs(Run(Place(cell.bins[:3], cell.bins[3]), "pd", 0), 0.0)
        assert math.isclose(cell.remote.ttft_ms.median, truth[0], rel_tol=0.3)
        assert math.isclose(cell.remote.tpot_ms.median, truth[1], rel_tol=0.15)
        (rate,) = cell.local.tokens_per_s  # 8 replies of 11 tokens in 4 s
        assert math.isclose(rate, 22.0, rel_tol=1e-3)


def test_too_little_to_fill_from_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, TOML + "\n[adaptive]\n")
    raw = tmp_path / "raw.jsonl"
    lines = [
        row
        for qps in (None, 0)
        for workload in config.workloads()
        for policy in config.policies
        for row in rows_of(config, Run(Place(workload, qps), policy, 0))
    ]
    raw.write_text("".join(json.dumps(row) + "\n" for row in lines))
    argv = ["table", "build", str(tmp_path / "sweep.toml"), str(raw), "--out", "none.json"]
    with pytest.raises(SystemExit, match="2 of 4 cells were measured: at least 8 must be"):
        cli.main(argv)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    file = write(tmp_path / "t.json", record())
    argv = [sys.executable, "-u", "-m", "eval", "table", "show", file, "--cells"]
    shown = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None
    shown.stdout.close()  # before anything is printed
    _, told = shown.communicate()
    assert (shown.returncode, told) == (141, b"")
