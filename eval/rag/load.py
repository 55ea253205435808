"""``ppd-eval rag-load``: chats that retrieve before and while they are decoded, on real workers,
beside others' bursts of searches in the same pool: with stages, and with a single queue.

Both pools and both routers run all the time, before the same two workers; one pair works at once.
Without GPUs the workers share one core, so that searches have the other one's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from ppd.contract import Role
from ppd.errors import ConfigError, WorkerError

from .. import tiny_model
from ..cluster import Process, gpu_flags, launching, wait_all
from ..endpoints import empty_caches
from ..metrics_text import read_metrics
from ..provenance import provenance
from ..raw_rows import append_whole
from .asking import ask
from .scene import COLLECTION, Passage, build_collection, passages, start_pool, start_router

WAYS = ("stages", "single_queue")
_OTHERS = "others"  # the collection that others search
_ROWS, _WIDTH, _ITOPK, _TOGETHER = 20_000, 384, 256, 8
_SHARE = 0.5  # of what the pool can do, on average
_BURST, _QUIET_S, _BURST_S = 5.0, 0.45, 0.05
_CHATS = 2
_DEADLINE_MS = 200.0
_LINK_BYTES_PER_S = 50e6  # taken as the KV link's, so that its use is seen
_QUERY = struct.Struct("<4sIIIIIf")


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    seconds: of each run.
    every_tokens: of a reply between two searches.
    """

    rounds: int
    seconds: float
    reply_tokens: int
    every_tokens: int


@dataclass(slots=True)
class Run:
    """What one way showed in one run.

    Attributes:
        searched_ms: of each turn's search before its prefill, as the router waited for it.
        late: of those, how many the pool cut short or the router gave up.
        decoding_s: from first token to last, of all replies.
        stalled_s: of that, behind passages.
        reserved, flush_ms: of the pool's scheduler, from look to look.
    """

    way: str
    number: int
    reply_tokens: int
    every_tokens: int
    others_per_s: float
    searched_ms: list[float] = field(default_factory=list)
    late: int = 0
    turns: int = 0
    added: int = 0
    decoding_s: float = 0.0
    stalled_s: float = 0.0
    reserved: list[float] = field(default_factory=list)
    flush_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pair:
    pool: Process
    router: Process


def run(
    model: str | None,
    docs: Path,
    cache: Path,
    plan: Plan,
    out: Path | None,
    logs: Path,
) -> int:
    """Returns the exit status; the last line on stdout is one JSON object.

    Raises:
        ConfigError: there are no docs, or a collection cannot be built.
        WorkerError: a turn failed.
    """
    path = tiny_model.resolve(model)
    found = passages(docs)
    data = logs / "rag-load"
    build_collection(found, data, cache)
    _build_others(data)
    with launching(logs) as launch:
        shared = None if gpu_flags(0, 2) else max(os.sched_getaffinity(0))
        prefill = launch.worker(Role.PREFILL, path, *gpu_flags(0, 2), core=shared)
        decode = launch.worker(Role.DECODE, path, *gpu_flags(1, 2), core=shared)
        first = None if shared is None else min(os.sched_getaffinity(0))
        pools = [
            start_pool(launch, data, cache, f"single_queue = {line}", core=first)
            for line in ("false", "true")
        ]
        wait_all([prefill, decode, *pools])
        told = (
            "feedback_interval_s = 0.25",
            f"link_bytes_per_s = {_LINK_BYTES_PER_S}",
            f"ttft_budget_ms = {_DEADLINE_MS}",
            f"max_ms = {_DEADLINE_MS}",
        )
        routers = [start_router(launch, prefill, decode, one, data, "full", *told) for one in pools]
        wait_all(routers)
        pairs = {
            way: Pair(pool, router) for way, pool, router in zip(WAYS, pools, routers, strict=True)
        }
        workers = [prefill.url, decode.url]
        runs = asyncio.run(_measure(pairs, workers, found, plan))
    if out is not None:
        origin = {"part": "rag-load", "model": Path(path).name, **provenance(0)}
        append_whole(out, [{**origin, **asdict(one)} for one in runs])
    print(json.dumps(summarize(runs)))
    return 0


def summarize(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Each way's runs together."""
    told = {}
    for way in WAYS:
        some = [one for one in runs if one.way == way]
        searched = np.concatenate([one.searched_ms for one in some])
        reserved = [value for one in some for value in one.reserved]
        flush = [value for one in some for value in one.flush_ms]
        told[way] = {
            "turns": sum(one.turns for one in some),
            "prefill_search_p50_ms": round(float(np.percentile(searched, 50)), 1),
            "prefill_search_p95_ms": round(float(np.percentile(searched, 95)), 1),
            "deadline_ms": _DEADLINE_MS,
            "late": sum(one.late for one in some),
            "passages_in_replies": sum(one.added for one in some),
            "stall": round(
                sum(one.stalled_s for one in some) / sum(one.decoding_s for one in some), 4
            ),
            "others_per_s": round(statistics.median(one.others_per_s for one in some)),
            "reserved_min": min(reserved),
            "reserved_max": max(reserved),
            "flush_ms_min": min(flush),
            "flush_ms_max": max(flush),
        }
    return told


def _build_others(data: Path) -> None:
    folder = data / "collections" / _OTHERS
    if folder.exists():
        return
    source = np.random.default_rng(0)
    centres = source.normal(size=(200, _WIDTH))
    rows = centres[source.integers(200, size=_ROWS)] + source.normal(size=(_ROWS, _WIDTH))
    file = data / "others.npy"
    np.save(file, rows.astype(np.float32))
    argv = [str(Path(sys.executable).with_name("ppd-pool")), "build", str(file), str(folder)]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ConfigError(f"ppd-pool build failed: {made.stderr.strip()[-500:]}")


async def _measure(
    pairs: dict[str, Pair],
    workers: list[str],
    found: Sequence[Passage],
    plan: Plan,
) -> list[Run]:
    runs: list[Run] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        most = await _capacity(http, pairs[WAYS[0]].pool)
        for number in range(-1, plan.rounds):  # the first warms up, and is not counted
            for way in WAYS if number % 2 else WAYS[::-1]:
                await empty_caches(http, workers)
                one = Run(way, number, plan.reply_tokens, plan.every_tokens, _SHARE * most)
                await _one(http, pairs[way], found, one, 5.0 if number < 0 else plan.seconds)
                runs += [one] if number >= 0 else []
                print(f"  round {number + 1} of {plan.rounds}, {way}", file=sys.stderr, flush=True)
    return runs


async def _capacity(http: aiohttp.ClientSession, pool: Process) -> float:
    """Searches a second, closed loop, while nothing else runs."""
    source = random.Random(0)
    done = 0

    async def search() -> None:
        nonlocal done
        while time.monotonic() < ends_s:
            await _search(http, pool, source)
            done += _TOGETHER

    ends_s = time.monotonic() + 3.0
    await asyncio.gather(*(search() for _ in range(8)))
    return done / 3.0


async def _one(
    http: aiohttp.ClientSession, pair: Pair, found: Sequence[Passage], run: Run, seconds: float
) -> None:
    before_s = _stalled_s(pair.router)
    ends_s = time.monotonic() + seconds
    chats = [_chat(http, pair, found, run, one, ends_s) for one in range(_CHATS)]
    async with _beside(_others(http, pair.pool, run), _look(pair.pool, run)):
        await asyncio.gather(*chats)
    run.stalled_s = _stalled_s(pair.router) - before_s


@asynccontextmanager
async def _beside(*forever: Any) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(one) for one in forever]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one


async def _others(http: aiohttp.ClientSession, pool: Process, run: Run) -> None:
    """Open loop: searches come when they come, whatever is under way."""
    source = random.Random(run.number)
    mean = run.others_per_s / _TOGETHER
    quiet = mean * (_QUIET_S + _BURST_S) / (_QUIET_S + _BURST * _BURST_S)
    began_s = time.monotonic()
    next_s = began_s
    async with asyncio.TaskGroup() as tasks:
        while True:
            in_burst = (next_s - began_s) % (_QUIET_S + _BURST_S) > _QUIET_S
            next_s += source.expovariate(quiet * (_BURST if in_burst else 1.0))
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            tasks.create_task(_search(http, pool, source))


async def _search(http: aiohttp.ClientSession, pool: Process, source: random.Random) -> None:
    rows = np.random.default_rng(source.getrandbits(32)).normal(size=(_TOGETHER, _WIDTH))
    head = _QUERY.pack(b"PPDQ", _TOGETHER, _WIDTH, 10, _ITOPK, 1, 60_000.0)
    async with http.post(
        f"{pool.url}/v1/collections/{_OTHERS}/search",
        data=head + rows.astype(np.float32).tobytes(),
        headers={"Content-Type": "application/octet-stream"},
    ) as answer:
        if answer.status not in (200, 429):  # a full queue is an answer, too
            raise WorkerError(f"a search failed: {answer.status} {await answer.text()}")


async def _look(pool: Process, run: Run) -> None:
    while True:
        seen = {name: value for name, _, value in await asyncio.to_thread(_metrics_of, pool)}
        run.reserved.append(round(seen["ppd_pool_reserved_share"], 3))
        run.flush_ms.append(round(1e3 * seen["ppd_pool_flush_seconds"], 3))
        await asyncio.sleep(0.5)  # between two looks; nothing waits for it


def _metrics_of(process: Process) -> list[tuple[str, dict[str, str], float]]:
    return list(read_metrics(process.url))


def _stalled_s(router: Process) -> float:
    wanted = "ppd_retrieval_stalled_seconds_total"
    return sum(value for name, _, value in read_metrics(router.url) if name == wanted)


async def _chat(
    http: aiohttp.ClientSession,
    pair: Pair,
    found: Sequence[Passage],
    run: Run,
    talker: int,
    ends_s: float,
) -> None:
    """Conversations of four turns about passages, one after the other."""
    source = random.Random(f"{run.number} {talker}")
    while time.monotonic() < ends_s:
        messages: list[dict[str, Any]] = []
        for _ in range(4):
            about = source.choice(found)
            messages.append({"role": "user", "content": f"What about this: {about.text[:90]}"})
            reply = await _turn(http, pair, messages, run)
            messages.append({"role": "assistant", "content": reply})


async def _turn(
    http: aiohttp.ClientSession, pair: Pair, messages: list[dict[str, Any]], run: Run
) -> str:
    wish = {
        "collection": COLLECTION,
        "k": 1,
        "stages": ["prefill", "decode"],
        "every_tokens": run.every_tokens,
    }
    body = {"messages": messages, "max_tokens": run.reply_tokens, "retrieval": wish}
    reply = await ask(http, pair.router.url, body)
    run.turns += 1
    run.decoding_s += reply.last_s - reply.first_s
    run.searched_ms.append(reply.retrieval["took_ms"])
    run.late += reply.retrieval["status"] in ("degraded", "failed")
    turn = (len(messages) + 1) // 2
    cited = reply.retrieval["citations"]
    run.added += sum((one["stage"], one["turn"]) == ("decode", turn) for one in cited)
    return reply.text
