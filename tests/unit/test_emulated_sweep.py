"""``ppd-eval emulate sweep``: what is measured, measured again, continued or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from eval.cli import main
from eval.emulation.sweeping import (
    drive,
    fitting,
    require_same,
    require_served,
    slow_motion_of,
    where_measured,
)
from eval.emulation.traces import RefusedRunError
from eval.samples import Sample
from eval.simulation.machine import Machine
from eval.sweep.config import Place, Run, SweepConfig, load_config
from eval.sweep.rows import RunResult, Writer, read_runs
from eval.table.build import build
from ppd.errors import ConfigError
from ppd.machine import Machine as WorkerMachine
from ppd.table import Table
from ppd.table_file import Axes, Bin

CONFIG = SweepConfig(
    shape="1P1D",
    turns=2,
    conversations=2,
    quiet_conversations=1,
    think_s=1.0,
    seeds=(0, 1),
    axes=Axes(
        (Bin(0, 4096, 1024),),
        (Bin(0, 64, 16), Bin(64, 512, 256)),
        (Bin(0, 64, 8),),
        (Bin(0, 9, 4),),
    ),
)
RUNS = 2 * 2 * 2 * 2  # workloads, quiet or not, policies, seeds
MACHINE = Machine("llama-3.1-8b-h100-tp1")


def sample(run: Run, turn: int) -> Sample:
    """The second turn is local under ``full``."""
    size = run.place.workload[1]
    new = 1000 + 100 * size if turn == 1 else round(CONFIG.axes.new_tokens[size].at)
    local = turn > 1 and run.policy == "full"
    return Sample(
        conversation=0, turn=turn, sent_at_s=float(turn), late_ms=0.0, context_tokens=0,
        new_tokens=new, output_tokens=8, cached_tokens=0, route="local" if local else "remote",
        reason="static", ttft_ms=5.0 + new / (20 if local else 10), tpot_ms=7.0, e2e_ms=3000.0,
    )  # fmt: skip


class Cluster:
    """It is too slow for some runs, so many times each."""

    def __init__(self, out: Path, refuses: int = 0) -> None:
        self.writer = Writer(CONFIG, out, where_measured(MACHINE, 15.0))
        self.writer.begin()
        self.refuses = refuses
        self.asked: list[Run] = []

    def measure(self, run: Run, tries: int) -> RunResult:
        assert tries == self.asked.count(run)  # so that the router gets other texts
        self.asked.append(run)
        if tries < self.refuses:
            raise RefusedRunError("the host stalled")
        samples = [sample(run, turn) for turn in (1, 2)]
        return self.writer.write(run, samples, 4.0, "emulated", {"bubble_share": 0.01})


@pytest.mark.parametrize(("pool_tokens", "conversations"), [(1_000_000, 2), (2700, 1), (100, 1)])
def test_a_run_holds_no_more_than_a_decode_worker_can(pool_tokens: int, conversations: int) -> None:
    """A conversation grows to 1,024 tokens of context, 256 new ones and a reply of 8."""
    assert fitting(CONFIG, Place((0, 1, 0), 0), pool_tokens).conversations == conversations
    assert fitting(CONFIG, Place((0, 0, 0), 0), 2500).conversations == 2, "fewer new tokens"


def test_its_table_names_what_was_emulated(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw.jsonl", tmp_path / "table.json"
    cluster = Cluster(raw)
    drive(CONFIG, {}, cluster.measure)
    assert len(cluster.asked) == len(set(cluster.asked)) == RUNS
    build(CONFIG, raw, out)
    record = Table.parse(out.read_bytes()).record
    hardware = "emulated llama-3.1-8b-h100-tp1, device, 100 Gb/s, slow motion 15"
    assert (record.model, record.provenance.hardware) == (MACHINE.load().file.model, hardware)
    assert record.machine == WorkerMachine("H100", 1, 100.0)
    assert record.cells[0].local.tokens_per_s == (4.0, 4.0)  # 16 tokens from 1 s to 5 s
    (first, *_) = read_runs(CONFIG, raw)
    assert first.summary["bubble_share"] == 0.01
    assert (first.summary["slow_motion"], first.summary["link_gbps"]) == (15.0, 100.0)


def test_a_run_that_was_too_fast_for_the_machine_is_measured_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "raw.jsonl", refuses=2)
    drive(CONFIG, {}, cluster.measure)
    assert len(cluster.asked) == 3 * RUNS
    assert len(list(read_runs(CONFIG, tmp_path / "raw.jsonl"))) == RUNS


def test_a_run_of_which_a_turn_failed_does_not_count() -> None:
    run = Run(Place((0, 0, 0), 0), "pd", 0)
    served = [sample(run, turn) for turn in (1, 2)]
    require_served(served)
    with pytest.raises(RefusedRunError, match=r"1 of 3 turns failed: HTTP 503"):
        require_served([*served, replace(served[0], error="HTTP 503")])


def test_a_machine_that_is_too_slow_ends_the_sweep_and_loses_nothing(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    first = Cluster(raw)

    def measure(run: Run, tries: int) -> RunResult:
        if len(first.asked) == 5:
            first.refuses = 9
        return first.measure(run, tries)

    with pytest.raises(RefusedRunError, match="the host stalled"):
        drive(CONFIG, {}, measure)
    medians = {result.run: result.medians() for result in read_runs(CONFIG, raw)}
    assert len(medians) == 5
    second = Cluster(raw)
    drive(CONFIG, medians, second.measure)
    assert len(second.asked) == RUNS - 5


def test_a_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    first = Cluster(raw)
    drive(msgspec.structs.replace(CONFIG, seeds=(0,)), {}, first.measure)
    medians = {result.run: result.medians() for result in read_runs(CONFIG, raw)}
    assert len(medians) == RUNS // 2
    second = Cluster(raw)
    drive(CONFIG, medians, second.measure)
    assert {run.seed for run in second.asked} == {1}


@pytest.mark.parametrize(
    ("machine", "slow_motion", "named"),
    [
        (Machine("llama-3.1-8b-l40s-tp1"), 15.0, "hardware 'emulated llama-3.1-8b-h100-tp1"),
        (Machine("llama-3.1-8b-h100-tp1", 25.0), 15.0, "100 Gb/s, slow motion 15'"),
        (Machine("qwen3-32b-h100-tp2"), 15.0, "raw.jsonl: has runs of model"),
        (MACHINE, 20.0, "these are of .*slow motion 20'"),
    ],
)
def test_runs_of_another_cluster_are_not_continued(
    tmp_path: Path, machine: Machine, slow_motion: float, named: str
) -> None:
    raw = tmp_path / "raw.jsonl"
    drive(CONFIG, {}, Cluster(raw).measure)
    runs = [result.summary for result in read_runs(CONFIG, raw)]
    require_same(runs, where_measured(MACHINE, 15.0), raw)
    with pytest.raises(ConfigError, match=named):
        require_same(runs, where_measured(machine, slow_motion), raw)


def test_the_slow_motion_is_that_of_the_heaviest_cell() -> None:
    heavy = Axes(
        CONFIG.axes.context_tokens,
        CONFIG.axes.new_tokens,
        (Bin(0, 4096, 2000),),
        (*CONFIG.axes.qps, Bin(9, 9999, 2000)),
    )
    assert slow_motion_of(CONFIG) == 10.0
    assert slow_motion_of(msgspec.structs.replace(CONFIG, axes=heavy)) > 10.0


def test_the_example_is_a_sweep() -> None:
    example = Path(__file__).parents[2] / "eval" / "sweep" / "emulated.toml"
    config = load_config(example)
    config.require_table()
    assert config.adaptive is None, "each cell with all seeds"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('shape = "2R"\npolicies = ["replica"]\n', "2R has no routes to compare"),
        ('shape = "1P1D"\nworker_flags = ["--x"]\n', "worker_flags are of real workers"),
    ],
)
def test_what_cannot_be_emulated_is_refused(tmp_path: Path, text: str, named: str) -> None:
    example = Path(__file__).parents[2] / "eval" / "sweep" / "emulated.toml"
    path = tmp_path / "sweep.toml"
    path.write_text(example.read_text().replace('shape = "1P1D"\n', text))
    argv = ["emulate", "sweep", str(path), "--profile", MACHINE.profile]
    with pytest.raises(SystemExit, match=named):
        main([*argv, "--out", str(tmp_path / "raw.jsonl"), "--table", str(tmp_path / "t.json")])


def test_a_failed_turn_has_not_strayed(tmp_path: Path) -> None:
    """It may have no route; it would count twice among the turns that are lost."""
    place = Place((0, 0, 0), None)
    run = Run(place, "full", 0)
    turns = [
        sample(run, 1),
        sample(run, 2),
        replace(sample(run, 2), route="", error="503"),
        replace(sample(run, 2), route="remote"),
    ]
    result = Writer(CONFIG, tmp_path / "rows.jsonl", {}).write(run, turns, 1.0, "1P1D")
    assert (result.summary["failed"], result.summary["strayed"]) == (1, 1)
