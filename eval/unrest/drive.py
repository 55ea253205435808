"""One run of ``load-router``: a router, its workers, clients and unrest; then what is left.

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
from .account import Books, Event, also, differences, explain, read_books, seen_back_after_s
from .schedule import Unrest, Workers, until_listening
from .talk import Shared, talk

_SETTLE_S = 30.0
_LOOKS = 30


@dataclass(frozen=True, slots=True)
class Target:
    """The router: where it listens, and in which process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def descriptors(self) -> int:
        """The fewest in a while: probes come and go."""
        process, seen = psutil.Process(self.pid), list[int]()
        while len(seen) < _LOOKS:
            seen.append(process.num_fds())
            await asyncio.sleep(0.01)
        return min(seen)

    def rss_mb(self) -> float:
        return round(float(psutil.Process(self.pid).memory_info().rss) / 2**20, 1)


@dataclass(slots=True)
class Run:
    """A load and what is known of it at the end; ``rss_mb`` by share of the requests done."""

    shared: Shared
    events: list[Event]
    books: Books
    seconds: float
    descriptors: tuple[int, int]  # before and after
    rss_mb: dict[float, float]

    @property
    def unexplained(self) -> list[str]:
        return self.shared.account.unexplained

    @property
    def differences(self) -> list[str]:
        return differences(self.shared.account, self.books)


async def drive(target: Target, workers: Workers, requests: int, talkers: int, seed: int) -> Run:
    """Load and unrest until all requests are answered.

    Raises:
        ClusterError: the router does not come to rest.
    """
    source = random.Random(seed)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=30.0)
    ) as http:
        for slot in workers.slots:
            await until_listening(slot)
        await _all_alive(http, target)
        unrest = Unrest(workers, target.url, http, random.Random(source.random()))
        shared = Shared(target.port, requests, unrest.calm_for, workers.drained_since)
        before, rss_mb = await target.descriptors(), {0.0: target.rss_mb()}
        began_s, over = time.monotonic(), asyncio.Event()
        troubles = asyncio.create_task(unrest.run(over))
        for share in (0.25, 0.5, 0.75):
            shared.marks[int((1 - share) * requests)] = partial(_note, rss_mb, share, target)
        try:
            await talk(shared, talkers, source)
        finally:
            over.set()
            await troubles
        seconds = time.monotonic() - began_s
        await _all_alive(http, target)
        books, after = await _at_rest(http, target, before)
    rss_mb[1.0] = target.rss_mb()
    _explain_all(shared, unrest.events, workers)
    return Run(shared, unrest.events, books, seconds, (before, after), rss_mb)


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


async def _at_rest(http: aiohttp.ClientSession, target: Target, before: int) -> tuple[Books, int]:
    """The router's books and descriptors when nothing is under way, and no connection kept."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        async with http.get(f"{target.url}/metrics") as answer:
            books = read_books(await answer.text())
        after = await target.descriptors()
        rests = not books.in_flight and not books.backlog_tokens and after <= before
        if rests or time.monotonic() > deadline_s:
            return books, after  # it is told as it is


def _explain_all(shared: Shared, events: list[Event], workers: Workers) -> None:
    account = shared.account
    roles = {role: len(workers.of(role)) for role in ("prefill", "decode")}
    for turn in shared.hung_up:
        for other in also(turn.reply, events):
            account.uncertain[turn.path, turn.outcome, other] += 1
    for turn in shared.odd:
        why = explain(turn.reply, events, roles)
        if why is None:
            messages = [str(error.get("message")) for error in turn.reply.errors]
            about = f"{turn.reply.status} {turn.outcome} {messages} {turn.reply.broken}"
            account.unexplained.append(f"{turn.path} {turn.kind}: {about}")
        else:
            account.explained[f"{turn.outcome}: {why}"] += 1
            if why.endswith("worker left"):
                late_s = seen_back_after_s(turn.reply, events)
                account.seen_back_after_s = max(account.seen_back_after_s, late_s)
