"""The clusters that a sweep measures on: started on this machine, or running elsewhere.

Each has a router for every policy. They share the workers, and one is used at a time. A cluster
that has lost a worker is started again if this sweep has started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ppd.contract import Role

from ..cluster import Launcher, Process, gpu_flags, launching, wait_all
from ..endpoints import is_ready
from .config import ClusterAt, SweepConfig


@dataclass(slots=True)
class Cluster:
    """One cluster that takes jobs.

    Attributes:
        at: URLs of its workers.
        routers: URL of each policy's.
        number: its place on this machine; None: it is not ours.
    """

    name: str
    at: ClusterAt
    routers: dict[str, str]
    number: int | None = None
    processes: list[Process] = field(default_factory=list)

    @property
    def workers(self) -> tuple[str, ...]:
        """The URLs of all workers."""
        return self.at.urls

    async def lost(self, http: aiohttp.ClientSession) -> list[str]:
        """Return the URLs of workers that do not answer."""
        return [url for url in self.workers if not await is_ready(http, url)]


@dataclass(slots=True)
class Fleet:
    """All clusters of a sweep; ``launch`` keeps what was started."""

    config: SweepConfig
    model: str
    launch: Launcher
    clusters: list[Cluster] = field(default_factory=list)

    def start(self) -> None:
        """Start all clusters of this machine.

        Raises:
            ClusterError: something did not start.
        """
        for number, cluster in enumerate(self.config.clusters):
            routers = {policy: router.url for policy, router in self._routers(cluster).items()}
            self.clusters.append(Cluster(f"given {number}", cluster, routers))
        if not self.config.clusters:
            _warn_of_shared_cores(self.config)
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
        at, workers = start_workers(self.launch, self.config, self.model, number)
        routers = self._routers(at)
        return Cluster(
            f"here {number}",
            at,
            {policy: router.url for policy, router in routers.items()},
            number,
            [*workers, *routers.values()],
        )

    def _routers(self, at: ClusterAt) -> dict[str, Process]:
        routers = {
            policy: router(self.launch, at, "--policy", policy) for policy in self.config.policies
        }
        wait_all(list(routers.values()))
        return routers


@contextmanager
def fleet(config: SweepConfig, model: str, logs: Path) -> Iterator[Fleet]:
    """Start all clusters; they are stopped when the context ends."""
    with launching(logs) as launch:
        all_of = Fleet(config, model, launch)
        all_of.start()
        yield all_of


def router(launch: Launcher, at: ClusterAt, *flags: str) -> Process:
    """One before the cluster, still starting."""
    return launch.router(at.prefill, at.decode, *flags, replica=at.replica)


def start_workers(
    launch: Launcher, config: SweepConfig, model: str, number: int = 0
) -> tuple[ClusterAt, list[Process]]:
    """Start the workers of one cluster, and wait; without GPUs each has a core of its own.

    Args:
        number: of the cluster; others on this machine have other cores or GPUs.
    """
    kinds = (Role.PREFILL, Role.DECODE, Role.REPLICA)
    roles = [role for role, count in zip(kinds, config.workers, strict=True) for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    started: list[Process] = []
    for i, role in enumerate(roles):
        at = number * len(roles) + i
        gpu = gpu_flags(at, len(roles) * config.clusters_here)
        core = None if gpu else cores[at % len(cores)]
        started.append(launch.worker(role, model, *config.worker_flags, *gpu, core=core))
    wait_all(started)
    urls = {
        kind: tuple(worker.url for role, worker in zip(roles, started, strict=True) if role is kind)
        for kind in kinds
    }
    return ClusterAt(urls[Role.PREFILL], urls[Role.DECODE], urls[Role.REPLICA]), started


def _warn_of_shared_cores(config: SweepConfig) -> None:
    workers, cores = sum(config.workers) * config.clusters_here, len(os.sched_getaffinity(0))
    if workers > cores and not gpu_flags(0, 1):
        warning = f"{workers} workers share {cores} cores: they disturb each other"
        print(f"warning: {warning}", file=sys.stderr)
