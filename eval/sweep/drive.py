"""Drives a sweep: job after job, on every cluster at once, and writes each run."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ppd.errors import WorkerError

from .. import tiny_model
from ..client import hold
from ..cluster import ClusterError
from ..endpoints import empty_caches, vocabulary_of
from ..samples import Sample
from .choice import Job, choice_of
from .clusters import Cluster, Fleet, fleet
from .config import Place, Run, SweepConfig, plan
from .rows import RunResult, Writer, read_runs, served_by

_MAX_DEATHS = 3  # of one cluster of ours, before it is not started again


def sweep(config: SweepConfig, model: str | None, out: Path, logs: Path) -> None:
    """Measure what ``out`` does not hold yet, and append it there.

    Raises:
        ConfigError: ``out`` holds something else, or cannot be written.
        WorkerError: no cluster is left; what was measured is kept.
    """
    path = tiny_model.resolve(model)
    results = list(read_runs(config, out))
    driver = Driver(config, Writer(config, out, served_by(path)), Progress(len(results)))
    for result in results:
        driver.medians[result.run] = result.medians()
    if driver.choice.next(driver.medians, ()) is not None:
        driver.writer.begin()
        with fleet(config, path, logs) as all_of:
            asyncio.run(driver.drive(all_of))
    summary = {"runs": len(driver.medians), "new": driver.progress.runs, "raw": str(out)}
    print(json.dumps(summary | {"cells": len(_cells(driver)), "grid": _grid(config)}))


@dataclass(slots=True)
class Progress:
    """Prints the progress of a sweep to stderr."""

    kept: int
    runs: int = 0
    jobs: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    def print_run(self, result: RunResult, jobs_left: int) -> None:
        """Print one line after a run."""
        self.runs += 1
        left_s = (time.monotonic() - self.begun_s) / max(1, self.jobs) * jobs_left
        place, summary = result.run.place, result.summary
        qps = "quiet" if place.qps is None else f"qps {place.qps}"
        counts = ", ".join(f"{summary[name]} {name}" for name in ("turns", "failed", "strayed"))
        print(
            f"\r{self.kept + self.runs} runs, at most {jobs_left} places, {left_s / 60:.0f} min "
            f"left; {place.workload} {qps} {result.run.policy} seed {result.run.seed}: {counts}   ",
            end="" if sys.stderr.isatty() else "\n",
            file=sys.stderr,
            flush=True,
        )


class Driver:
    """Runs one task for each cluster; all take from one choice and write to one file."""

    def __init__(self, config: SweepConfig, writer: Writer, progress: Progress) -> None:
        self._config = config
        self.writer = writer
        self.progress = progress
        self.medians: dict[Run, tuple[float, float] | None] = {}
        self.choice = choice_of(config)
        self._busy: list[Job] = []
        self._changed = asyncio.Event()

    async def drive(self, all_of: Fleet) -> None:
        """Measure until nothing is left.

        Raises:
            ConfigError: a row cannot be written.
            WorkerError: no cluster is left.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        # Servers close idle connections, and a POST on one that is just closing fails.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            tasks = [asyncio.create_task(self._use(http, all_of, c)) for c in all_of.clusters]
            try:
                lost = [problem for problem in await asyncio.gather(*tasks) if problem is not None]
            finally:
                for task in tasks:
                    task.cancel()
        if self.choice.next(self.medians, ()) is not None:
            raise WorkerError(
                f"no cluster is left: {'; '.join(lost)}. What was measured is kept: the same "
                "command goes on from there"
            )

    async def _use(self, http: aiohttp.ClientSession, all_of: Fleet, mine: Cluster) -> str | None:
        """Measure on one cluster; return the reason if it was lost for good."""
        deaths = 0
        while True:
            try:
                vocabulary = await vocabulary_of(http, (mine.at.decode or mine.at.replica)[0])
                await self._warm(mine, vocabulary)
                await self._measure(http, mine, vocabulary)
                return None
            except (WorkerError, aiohttp.ClientError, TimeoutError) as error:
                deaths += 1
                problem = f"cluster {mine.name}: {error or type(error).__name__}"
                print(f"\n{problem}", file=sys.stderr, flush=True)
                if mine.number is None or deaths == _MAX_DEATHS:
                    return problem
            try:
                mine = await asyncio.to_thread(all_of.again, mine)
            except ClusterError as error:
                return f"cluster {mine.name}: {error}"

    async def _warm(self, mine: Cluster, vocabulary: range) -> None:
        """Kernels warm up, connections open: not measured."""
        first = next(iter(self._config.workloads()))
        plans = plan(self._config, Place(first, 0), self._config.seeds[0])
        for router in mine.routers.values():
            await hold(router, plans, seed="warm", vocabulary=vocabulary)

    async def _measure(self, http: aiohttp.ClientSession, mine: Cluster, vocabulary: range) -> None:
        while True:
            self._changed.clear()
            job = self.choice.next(self.medians, self._busy)
            if job is None and not self._busy:
                self._changed.set()
                return
            if job is None:  # what others measure may open something, or settle it
                await self._changed.wait()
                continue
            self._busy.append(job)
            try:
                for run in job.runs(self._config.policies):
                    if run not in self.medians:
                        result = await self._run(http, mine, vocabulary, run)
                        self.medians[run] = result.medians()
                        self.progress.print_run(result, self.choice.left(self.medians))
                self.progress.jobs += 1
            finally:
                self._busy.remove(job)
                self._changed.set()

    async def _run(
        self, http: aiohttp.ClientSession, mine: Cluster, vocabulary: range, run: Run
    ) -> RunResult:
        """Measure one run on one cluster.

        Raises:
            WorkerError: a worker was lost meanwhile: nothing is written.
        """
        await empty_caches(http, mine.workers)
        begun_s = time.monotonic()
        plans = plan(self._config, run.place, run.seed)
        samples: list[Sample] = []
        for i, part in enumerate([plans] if run.place.qps is not None else [[p] for p in plans]):
            samples += await hold(
                mine.routers[run.policy],
                part,
                seed=f"{run.place.workload}/{run.place.qps}/{run.seed}/{i}",
                vocabulary=vocabulary,
            )
        wall_s = time.monotonic() - begun_s
        if any(sample.error for sample in samples) and (lost := await mine.lost(http)):
            raise WorkerError(f"{', '.join(lost)} do not answer; that run is measured again")
        return self.writer.write(run, samples, wall_s, mine.name)


def _cells(driver: Driver) -> set[Place]:
    return {run.place for run in driver.medians if run.place.qps is not None}


def _grid(config: SweepConfig) -> int:
    return len(list(config.workloads())) * len(config.axes.qps)
