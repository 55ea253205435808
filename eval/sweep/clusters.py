"""Where a sweep measures: clusters started on this machine, or clusters that are there.

Each has a router for every policy; they share the workers, one is driven at a time. A cluster
that lost a worker is started again if it is ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ppd.contract import Role

from ..cluster import Launcher, Process, gpu_flags, launching, wait_all
from ..endpoints import is_ready
from .config import SweepConfig


@dataclass(slots=True)
class Cluster:
    """
    Attributes:
        workers: URLs, those of the prefill workers first.
        routers: URL of each policy's.
        number: its place on this machine; None: it is not ours.
    """

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    routers: dict[str, str]
    number: int | None = None
    processes: list[Process] = field(default_factory=list)

    @property
    def workers(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    async def lost(self, http: aiohttp.ClientSession) -> list[str]:
        """URLs of workers that do not answer."""
        return [url for url in self.workers if not await is_ready(http, url)]


@dataclass(slots=True)
class Fleet:
    """All clusters of a sweep; ``launch`` keeps what was started."""

    config: SweepConfig
    model: str
    launch: Launcher
    clusters: list[Cluster] = field(default_factory=list)

    def start(self) -> None:
        """Raises:
        ClusterError: something did not start.
        """
        for number, one in enumerate(self.config.clusters):
            routers = self._routers(one.prefill, one.decode)
            urls = {policy: router.url for policy, router in routers.items()}
            self.clusters.append(Cluster(f"given {number}", one.prefill, one.decode, urls))
        if not self.config.clusters:
            _tell_of_shared_cores(self.config)
            self.clusters = [self._here(n) for n in range(self.config.clusters_here)]

    def again(self, cluster: Cluster) -> Cluster:
        """The same in its place, started anew.

        Raises:
            ClusterError: it did not start.
        """
        assert cluster.number is not None
        for process in reversed(cluster.processes):
            process.stop()
        anew = self._here(cluster.number)
        self.clusters[self.clusters.index(cluster)] = anew
        return anew

    def _here(self, number: int) -> Cluster:
        prefill, decode = start_workers(self.launch, self.config, self.model, number)
        urls = [[worker.url for worker in some] for some in (prefill, decode)]
        routers = self._routers(*urls)
        return Cluster(
            f"here {number}",
            tuple(urls[0]),
            tuple(urls[1]),
            {policy: router.url for policy, router in routers.items()},
            number,
            [*prefill, *decode, *routers.values()],
        )

    def _routers(self, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Process]:
        routers = {
            policy: self.launch.router(prefill, decode, "--policy", policy)
            for policy in self.config.policies
        }
        wait_all(list(routers.values()))
        return routers


@contextmanager
def fleet(config: SweepConfig, model: str, logs: Path) -> Iterator[Fleet]:
    """Started; stopped when the context ends."""
    with launching(logs) as launch:
        all_of = Fleet(config, model, launch)
        all_of.start()
        yield all_of


def start_workers(
    launch: Launcher, config: SweepConfig, model: str, number: int = 0
) -> tuple[list[Process], list[Process]]:
    """Prefill and decode workers of one cluster, ready; without GPUs each on a core of its own.

    Args:
        number: of the cluster; others on this machine have other cores or GPUs.
    """
    prefill, decode = config.workers
    here = prefill + decode
    every = here * config.clusters_here
    started: list[Process] = []
    cores = sorted(os.sched_getaffinity(0))
    for i in range(here):
        at = number * here + i
        gpu = gpu_flags(at, every)
        role = Role.PREFILL if i < prefill else Role.DECODE
        core = None if gpu else cores[at % len(cores)]
        started.append(launch.worker(role, model, *config.worker_flags, *gpu, core=core))
    wait_all(started)
    return started[:prefill], started[prefill:]


def _tell_of_shared_cores(config: SweepConfig) -> None:
    workers, cores = sum(config.workers) * config.clusters_here, len(os.sched_getaffinity(0))
    if workers > cores and not gpu_flags(0, 1):
        told = f"{workers} workers share {cores} cores: they disturb each other"
        print(f"warning: {told}", file=sys.stderr)
