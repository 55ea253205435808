"""A sweep on fake workers: several clusters at once, and what happens when they or the disk go."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from eval.cluster import Launcher
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from eval.sweep.clusters import Cluster, Fleet
from eval.sweep.config import ClusterAt, SweepConfig
from eval.sweep.drive import Driver, Progress
from eval.sweep.rows import RunResult, Writer, read_runs, served_by
from ppd.errors import ConfigError, WorkerError
from ppd.table_file import Axes, Bin
from router.config.options import RouterConfig
from router.server.run import running

from .test_load_command import whole

SWEEP = SweepConfig(
    shape="1P1D",
    turns=2,
    conversations=2,
    quiet_conversations=1,
    think_s=0.001,
    seeds=(0, 1),
    axes=Axes(
        (Bin(0, 512, 200),),
        (Bin(0, 64, 16), Bin(64, 512, 100)),
        (Bin(0, 64, 3),),
        (Bin(0, 999, 99),),
    ),
    hardware="none at all",
)
RUNS = 2 * 2 * 2 * 2  # workloads, quiet or not, policies, seeds


@asynccontextmanager
async def cluster(name: str, decode: Script = whole) -> AsyncIterator[tuple[Cluster, FakeWorker]]:
    async with AsyncExitStack() as stack:
        engines = [FakeWorker("prefill", whole), FakeWorker("decode", decode)]
        for engine in engines:
            await stack.enter_async_context(engine.serving())
        at = ClusterAt((engines[0].url,), (engines[1].url,))
        routers = {}
        for policy in SWEEP.policies:
            config = RouterConfig(prefill=at.prefill, decode=at.decode, port=0, policy=policy)
            routers[policy] = await stack.enter_async_context(running(config))
        yield Cluster(name, at, routers), engines[1]


async def drive(out: Path, *clusters: Cluster) -> Driver:
    given = tuple(one.at for one in clusters)
    config = msgspec.structs.replace(SWEEP, clusters=given)
    told = list(read_runs(config, out))
    driver = Driver(config, Writer(config, out, served_by("model")), Progress(len(told)))
    driver.medians |= {one.run: one.medians() for one in told}
    driver.writer.begin()
    with ExitStack() as stack:
        fleet = Fleet(config, "model", Launcher(out.parent, stack), [*clusters])
        await driver.drive(fleet)
    return driver


def rows(out: Path) -> list[RunResult]:
    return list(read_runs(SWEEP, out))


def dying_after(requests: int) -> Script:
    """It answers so many and then is gone, for its health's asker, too."""
    left = [requests]

    async def script(request: Request) -> None:
        left[0] -= 1
        if left[0] >= 0:
            await whole(request)
        else:
            request.worker.ready = False
            request.drop()

    return script


async def test_clusters_share_a_sweep_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    async with cluster("a") as (a, _), cluster("b") as (b, _):
        await drive(out, a, b)
        told = rows(out)
        assert len({one.run for one in told}) == len(told) == RUNS
        assert {one.summary["cluster"] for one in told} == {"a", "b"}
        assert all(one.summary["hardware"] == "none at all" for one in told)
        assert {turn["route"] for one in told for turn in one.later()} == {"local", "remote"}
        again = await drive(out, a, b)
    assert again.progress.runs == 0
    assert len(rows(out)) == RUNS


async def test_a_cluster_that_dies_leaves_its_work_to_the_others(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    async with cluster("a", dying_after(20)) as (a, _), cluster("b") as (b, _):
        await drive(out, a, b)
    told = rows(out)
    assert len({one.run for one in told}) == len(told) == RUNS
    assert not any(one.summary["failed"] for one in told)


async def test_without_clusters_a_sweep_ends_with_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    async with cluster("a", dying_after(20)) as (a, engine):
        with pytest.raises(WorkerError, match=f"no cluster is left: .*{engine.url} do not answer"):
            await drive(out, a)
    kept = len(rows(out))
    assert 0 < kept < RUNS
    async with cluster("b") as (b, _):
        rest = await drive(out, b)
    assert rest.progress.runs == RUNS - kept
    assert len(rows(out)) == RUNS


async def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with cluster("a") as (a, _):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
            with pytest.raises(ConfigError, match=r"raw.jsonl: cannot be written: .* is kept"):
                await drive(out, a)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert out.read_bytes().endswith(b"\n"), "no half rows"
        kept = len(rows(out))
        assert 0 < kept < RUNS
        assert (await drive(out, a)).progress.runs == RUNS - kept
    assert asyncio.all_tasks() == {asyncio.current_task()}
