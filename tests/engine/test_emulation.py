"""An emulated prefill and decode worker: turns take what the profile predicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from eval.cli import main
from eval.emulation.check import Plan, measure
from eval.emulation.check_rows import largest_error, summarize
from eval.emulation.clusters import Run, run_once, start_cluster
from eval.emulation.compare import middle, simulate, values
from eval.emulation.drafts import Drafts
from eval.emulation.traces import RefusedRunError
from eval.emulation.workers import Emulated, emulated
from eval.profiles.profile import Extend, Step, load_profile
from eval.raw_rows import read_rows
from eval.summary import Slo
from ppd.contract import Role
from ppd.table import Table
from sglang_patches.engines import ENGINES

from .workers import begin_stop, wait_ready, worker_launcher

_PROFILE = "llama-3.1-8b-h100-tp1"
# One turn of each way, with HTTP and handshakes a small part of it.
_PLAN = Plan(
    slow_motion=40,
    repeats=1,
    contexts=(2048,),
    links_gbps=(100.0,),
    decodes=(0,),
    min_wall_s=3.0,
)


_SWEEP = """
shape = "1P1D"
turns = 2
conversations = 2
quiet_conversations = 1
think_s = 0.05
seeds = [0]

[axes]
context_tokens = [{ low = 0, high = 2048, at = 1024 }, { low = 2048, high = 8192, at = 4096 }]
new_tokens = [{ low = 0, high = 512, at = 128 }, { low = 512, high = 4096, at = 1024 }]
output_tokens = [{ low = 0, high = 128, at = 8 }]
qps = [{ low = 0, high = 40, at = 6 }]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    folder = tmp_path_factory.mktemp("emulation")
    with (
        worker_launcher(folder) as launch,
        emulated(launch, load_profile(_PROFILE), _PROFILE, folder / "emulated") as cluster,
    ):
        cluster.start("p0", Role.PREFILL)
        cluster.start("d0", Role.DECODE, "PPD_APPEND_CHUNK=512")
        wait_ready(*cluster.workers.values())
        cluster.start("refused", Role.PREFILL, "--disable-overlap-schedule")
        yield cluster
        begin_stop(launch.started)


def test_turns_take_what_was_predicted(cluster: Emulated) -> None:
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(measure(cluster, _PLAN, set(), rows.append, {}))
    except RefusedRunError as refused:
        pytest.skip(f"the machine is too busy to emulate anything: {refused}")
    summary = summarize(rows)  # compares KV bytes and routes, too
    assert [cell["route"] for cell in summary["cells"]] == ["remote", "remote", "remote", "local"]
    assert largest_error(summary) < 0.25  # of the check: 0.05; here one repeat beside other jobs
    assert summary["bubble_share"] < 0.02
    predicted = {row["cell"]: row for row in rows if row["row"] == "prediction"}
    for cell in summary["cells"]:
        assert abs(cell["cached_tokens"] - predicted[cell["name"]]["cached_tokens"]) <= 1


def test_a_flag_that_is_not_emulated_ends_the_worker(cluster: Emulated) -> None:
    refused = cluster.workers["refused"]
    assert refused.popen.wait(120) != 0
    assert "not emulated: --disable-overlap-schedule" in refused.log.read_text()


_DRAFTS = "0.9,0.7,0.5@0.04"


@pytest.mark.skipif(
    not ENGINES[version("sglang")].speculative_algorithms,
    reason="this SGLang refuses speculation beside the decode radix cache",
)
@pytest.mark.matrix
def test_drafts_are_accepted_at_their_rates(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("drafts")
    profile, drafts = load_profile(_PROFILE), Drafts.parse(_DRAFTS)
    workload = "turns:2?first=2048&first_out=128&new=128&out=128&think_s=0.1"
    run = Run(workload, "full", 1.0, 0, 3, 60.0, 100.0, drafts=_DRAFTS)
    with (
        worker_launcher(folder) as launch,
        emulated(launch, profile, _PROFILE, folder / "emulated", drafts) as cluster,
    ):
        router = start_cluster(cluster, "1P1D", ["--policy", "full"], [])
        try:
            *turns, summary = run_once(cluster, router, run, Slo(None, None))
        except RefusedRunError as refused:
            pytest.skip(f"the machine is too busy to emulate anything: {refused}")
        finally:
            begin_stop(launch.started)
    assert summary["failed"] == 0
    assert summary["local"] == 3  # all later turns
    assert {turn["output_tokens"] for turn in turns} == {128}
    # Three verify steps' worth of drafts, and one forward of the draft behind each.
    step = Step((), 1, 2200, drafts.steps + 1)
    alone_ms = profile.step_ms(step) + drafts.share * (
        profile.step_ms(step) + (drafts.steps - 1) * profile.step_ms(Step((), 1, 2200))
    )
    quickest = min(turn["tpot_ms"] for turn in turns)
    assert quickest == pytest.approx(alone_ms / drafts.tokens_per_step, rel=0.25)
    plain_ms = profile.step_ms(Step((), 1, 2200))
    assert summary["tpot_p50_ms"] < 0.7 * plain_ms


@pytest.mark.matrix
def test_ranks_step_together_as_in_the_simulator(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    profile = load_profile(_PROFILE)
    workload = "turns:2?first=4096&first_out=64&new=1024&out=64&think_s=0.3"
    run = Run(workload, "full", 4.0, 0, 12, 60.0, 100.0)
    with (
        worker_launcher(folder) as launch,
        emulated(launch, profile, _PROFILE, folder / "emulated", ranks=True) as cluster,
    ):
        router = start_cluster(cluster, "1P1Dx2", ["--policy", "full"], [])
        try:
            *turns, summary = run_once(cluster, router, run, Slo(None, None))
        except RefusedRunError as refused:
            pytest.skip(f"the machine is too busy to emulate anything: {refused}")
        finally:
            begin_stop(launch.started)
    assert summary["failed"] == 0
    assert len(turns) == 24
    assert summary["local"] == 12
    found = values(simulate(run, "1P1Dx2", _PROFILE, "device"))
    for name in ("t2_ttft_p50_ms", "tpot_p50_ms"):
        assert summary[name] == pytest.approx(middle(found[name]), rel=0.25)


@pytest.mark.matrix
def test_a_sweep_makes_a_table_of_what_the_profile_predicts(tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(_SWEEP)
    raw, table = tmp_path / "raw.jsonl", tmp_path / "table.json"
    argv = ["emulate", "sweep", str(config), "--profile", _PROFILE, "--slow-motion", "20"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--out", str(raw), "--table", str(table), "--logs", str(tmp_path)])
    refused = str(ended.value.code)
    if "more slow motion is needed" in refused or "repeat on a quieter machine" in refused:
        pytest.skip(f"the machine is too busy to emulate anything: {refused}")
    assert ended.value.code == 0
    record = Table.parse(table.read_bytes()).record
    # Alone: an append of so many tokens, and the decode step of one.
    profile = load_profile(_PROFILE)
    for cell in record.cells:
        context = record.axes.context_tokens[cell.bins[0]].at
        new = record.axes.new_tokens[cell.bins[1]].at
        append_ms = profile.step_ms(Step((Extend(int(new), int(context)),)))
        assert cell.local.quiet_ttft_ms == pytest.approx(append_ms, rel=0.25)
        assert cell.remote.quiet_ttft_ms > cell.local.quiet_ttft_ms
        step_ms = profile.step_ms(Step((), 1, int(context)))
        assert cell.local.tpot_ms.median == pytest.approx(step_ms, rel=0.3)
        assert min(cell.local.tokens_per_s) > 0


_COMPARED = """
seeds = [0]
policies = ["pd", "full"]
weightings = [{ ttft = 1.0, tpot = 1.0 }]
[emulated]
machine = { profile = "llama-3.1-8b-h100-tp1", link_gbps = 100 }
slow_motion = 20
[[traces]]
name = "short"
workload = "turns:3?first=4096&first_out=16&new=128&out=16&think_s=0.2"
conversations = 3
qps = 4.0
poisson = true
seconds = 1.0
"""


@pytest.mark.matrix
def test_ways_are_compared_on_an_emulated_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, raw = tmp_path / "compare.toml", tmp_path / "raw.jsonl"
    config.write_text(_COMPARED)
    argv = ["compare", str(config), "--out", str(raw), "--logs", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        refused = str(ended.value.code)
        if "more slow motion is needed" in refused or "repeat on a quieter machine" in refused:
            pytest.skip(f"the machine is too busy to emulate anything: {refused}")
        assert ended.value.code == 0, refused
    (trace,) = json.loads(capsys.readouterr().out.splitlines()[-1])["traces"]
    runs = [row for _, row in read_rows(raw) if row["row"] == "run"]
    # The second command has measured nothing.
    assert sorted(row["way"] for row in runs) == ["full", "pd", "ppd 1:1"]
    assert all(row["failed"] == 0 and row["slow_motion"] == 20 for row in runs)
    assert trace["later_turns"] > 0
    assert trace["ways"]["full"]["local_share"] == 1.0
    assert trace["ways"]["pd"]["kv_mb_moved"] > trace["ways"]["full"]["kv_mb_moved"] > 0
    # A turn takes what it takes on the device, not in slow motion.
    alone_ms = load_profile(_PROFILE).step_ms(Step((Extend(128, 4112),)))
    assert trace["ways"]["full"]["ttft_p50_ms"] < 5 * alone_ms
