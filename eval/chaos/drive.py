"""One chaos run: a router, its workers, its clients and disruptions; then what is left.

The router may be any process, also the caller's own.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from functools import partial

import aiohttp
import psutil

from ..cluster import ClusterError
from .accounting import (
    Injection,
    RouterCounts,
    differences,
    explain,
    other_outcomes,
    parse_router_counts,
    recovery_delay_s,
)
from .clients import RunState, run_clients
from .schedule import ChaosSchedule, WorkerProcesses, wait_until_listening

_SETTLE_S = 30.0
_LOOKS = 30


@dataclass(frozen=True, slots=True)
class Target:
    """The port and the process of the router under test."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """The base URL of the router."""
        return f"http://127.0.0.1:{self.port}"

    async def descriptors(self) -> int:
        """Return the fewest open descriptors in a while: probes come and go."""
        process, seen = psutil.Process(self.pid), list[int]()
        while len(seen) < _LOOKS:
            seen.append(process.num_fds())
            await asyncio.sleep(0.01)
        return min(seen)

    def rss_mb(self) -> float:
        """Return the resident memory in MiB."""
        return round(float(psutil.Process(self.pid).memory_info().rss) / 2**20, 1)


@dataclass(slots=True)
class Run:
    """A finished run.

    Attributes:
        descriptors: open before and after it.
        rss_mb: memory, by the share of requests that were done.
    """

    shared: RunState
    injections: list[Injection]
    router_counts: RouterCounts
    seconds: float
    descriptors: tuple[int, int]
    rss_mb: dict[float, float]

    @property
    def unexplained(self) -> list[str]:
        """What should not have happened."""
        return self.shared.counts.unexplained

    @property
    def differences(self) -> list[str]:
        """Where clients and router have counted differently."""
        return differences(self.shared.counts, self.router_counts)


async def drive(
    target: Target, workers: WorkerProcesses, requests: int, clients: int, seed: int
) -> Run:
    """Send the requests and disrupt the workers, until all requests are answered.

    Raises:
        ClusterError: the router does not come to rest.
    """
    source = random.Random(seed)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=30.0)
    ) as http:
        for slot in workers.slots:
            await wait_until_listening(slot)
        await _all_alive(http, target)
        chaos = ChaosSchedule(workers, target.url, http, random.Random(source.random()))
        shared = RunState(target.port, requests, chaos.calm_for, workers.drained_since)
        before, rss_mb = await target.descriptors(), {0.0: target.rss_mb()}
        began_s, over = time.monotonic(), asyncio.Event()
        disruptions = asyncio.create_task(chaos.run(over))
        for share in (0.25, 0.5, 0.75):
            shared.marks[int((1 - share) * requests)] = partial(_note, rss_mb, share, target)
        try:
            await run_clients(shared, clients, source)
        finally:
            over.set()
            await disruptions
        seconds = time.monotonic() - began_s
        await _all_alive(http, target)
        router_counts, after = await _at_rest(http, target, before)
    rss_mb[1.0] = target.rss_mb()
    _explain_all(shared, chaos.injections, workers)
    return Run(shared, chaos.injections, router_counts, seconds, (before, after), rss_mb)


def _note(rss_mb: dict[float, float], share: float, target: Target) -> None:
    rss_mb[share] = target.rss_mb()


async def _all_alive(http: aiohttp.ClientSession, target: Target) -> None:
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        async with http.get(f"{target.url}/health") as answer:
            dead = [w["url"] for w in (await answer.json())["workers"] if not w["alive"]]
        if not dead:
            return
        if time.monotonic() > deadline_s:
            raise ClusterError(f"the router takes living workers for dead: {', '.join(dead)}")
        await asyncio.sleep(0.05)


async def _at_rest(
    http: aiohttp.ClientSession, target: Target, before: int
) -> tuple[RouterCounts, int]:
    """Return counts and descriptors when nothing is under way, and no connection is kept."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        async with http.get(f"{target.url}/metrics") as answer:
            router_counts = parse_router_counts(await answer.text())
        after = await target.descriptors()
        rests = not router_counts.in_flight and not router_counts.backlog_tokens and after <= before
        if rests or time.monotonic() > deadline_s:
            return router_counts, after  # the caller judges what is left


def _explain_all(shared: RunState, injections: list[Injection], workers: WorkerProcesses) -> None:
    counts = shared.counts
    roles = {role: len(workers.of(role)) for role in ("prefill", "decode")}
    for turn in shared.hung_up:
        for other in other_outcomes(turn.reply, injections):
            counts.uncertain[turn.path, turn.outcome, other] += 1
    for turn in shared.unexpected:
        why = explain(turn.reply, injections, roles)
        if why is None:
            messages = [str(error.get("message")) for error in turn.reply.errors]
            about = f"{turn.reply.status} {turn.outcome} {messages} {turn.reply.broken}"
            counts.unexplained.append(f"{turn.path} {turn.kind}: {about}")
        else:
            counts.explained[f"{turn.outcome}: {why}"] += 1
            if why.endswith("worker left"):
                late_s = recovery_delay_s(turn.reply, injections)
                counts.seen_back_after_s = max(counts.seen_back_after_s, late_s)
