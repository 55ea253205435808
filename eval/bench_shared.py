"""``ppd-eval bench shared``: what the store that routers share costs a router."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from ppd.backlog import Backlog
from ppd.errors import PpdError
from ppd.prefix import Digest, PrefixChain, hash_messages
from ppd.sessions import SessionIndex, Turn
from ppd.shared_records import Batch, SharedTurn, encode

from .options import Commands
from .provenance import provenance
from .store_server import StoreServer, program

_HOMES = [f"http://d{i}:30000#{i:032x}.0" for i in range(8)]
_PREFILL = f"http://p0:30000#{9:032x}.0"
_TTL_S = 3600.0
_BATCH = 64
_MODEL = "model"
_ALONE = 10_000  # records that are written one by one
_CHAINS = 10_000
_STEP_S = 0.001
_LOAD_STEP_S = 0.01  # a timer costs as much as several records
_ROUNDS = 5
_WRITERS_START_S = 3.0


def add_to(commands: Commands) -> None:
    """Declare ``bench shared``."""
    parser = commands.add_parser(
        "shared",
        help="cost of the store that routers share",
        description=(
            "Measure what the shared store costs a router: time of its event loop for each "
            "request, visibility at another router, memory. A server is started for it. The "
            "last line is one JSON object."
        ),
    )
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--rate", type=int, default=1000, help="requests a second of each router")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print one JSON line."""
    path = program()
    if path is None:
        raise PpdError("neither valkey-server nor redis-server is installed")
    with tempfile.TemporaryDirectory() as folder:
        measured = uvloop.run(_measure(StoreServer(path, Path(folder)), options))
    print(json.dumps({**measured, **provenance(options.seed)}))
    return 0


async def _measure(server: StoreServer, options: argparse.Namespace) -> dict[str, object]:
    queue_us = _queue_us(server)
    async with server.running():
        loaded = await _under_load(server, options.routers, options.rate, options.seconds)
    async with server.running():
        filled = await _filled(server, options.sessions, random.Random(options.seed))
    return {
        "queue_us_median": round(statistics.median(queue_us), 2),
        "queue_us_p99": _p99(queue_us),
        **loaded,
        **filled,
        "routers": options.routers,
        "rate": options.rate,
    }


def _chain(number: int) -> PrefixChain:
    return hash_messages(b"salt", [{"role": "user", "content": f"conversation {number}"}])


def _turn(number: int, source: random.Random) -> Turn:
    prompt = source.randrange(500, 20_000)
    home, reply = _HOMES[number % len(_HOMES)], source.randrange(10, 900)
    return Turn(2**47 + number, 1, home, prompt, reply, _PREFILL, prompt, 100.0)


def _sharing(server: StoreServer, capacity: int) -> _Routed:
    return _sharing_of(server.url, capacity)


@dataclass(frozen=True, slots=True)
class _Routed:
    """The shared state of a router without workers.

    Attributes:
        sharing: a ``router.shared.sharing.Sharing``.
        index: its turns.
        publish: queues a finished turn.
    """

    sharing: Any
    index: SessionIndex
    publish: Callable[[PrefixChain, Turn, Digest | None], None]


def _sharing_of(url: str, capacity: int) -> _Routed:
    config = _router("config.shared").SharedConfig(url, catch_up_s=600.0, timeout_ms=5000.0)
    sharing = _router("shared.sharing").Sharing(
        config=config,
        store=_router("shared.store").Store(config, _TTL_S),
        ttl_s=_TTL_S,
        registry=_router("workers.registry").WorkerRegistry(control=None),
        metrics=_router("shared.metrics").SharedMetrics(CollectorRegistry()),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    index = SessionIndex(capacity=capacity, ttl_s=_TTL_S)
    return _Routed(sharing, index, sharing.serve(_MODEL, index, Backlog()))


def _router(module: str) -> Any:
    """Return a module of the router by the name that its folder has where it is installed."""
    return import_module(f"ppd_router.{module}")


def _queue_us(server: StoreServer) -> list[float]:
    """Time that a request spends on the store: its record is queued."""
    publish = _sharing(server, 1).publish
    chains = [_chain(i) for i in range(10_000)]
    turns = [_turn(i, random.Random(i)) for i in range(10_000)]
    times = []
    for chain, turn in zip(chains, turns, strict=True):
        times.append(_us(partial(publish, chain, turn, None)))
    return times


async def _under_load(
    server: StoreServer, routers: int, rate: int, seconds: float
) -> dict[str, object]:
    """Measure processor time and visibility, with ``routers`` that each serve ``rate``.

    The other routers are processes. The time is that of this process, less that of the same load
    without a store: first with its own records only, then with those of all.
    """
    chains = [_chain(number) for number in range(_CHAINS)]
    turn = _turn(0, random.Random(0))
    one = _sharing(server, _CHAINS)

    def publish(number: int) -> None:
        one.publish(chains[number % _CHAINS], turn, None)

    idle_us, own_us = await _own_us(one, publish, rate, seconds)
    async with _running(one):
        others = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, server.url, str(rate), str(3 * seconds + 60))
            )
            for _ in range(routers - 1)
        ]
        await asyncio.sleep(_WRITERS_START_S)
        all_us = await _loop_us(publish, rate, seconds) - idle_us
        async with _running(_sharing(server, _CHAINS)) as late:
            index = late.index
            visible_ms = await _visible_ms(publish, one, index, rate, seconds / 2)
        for other in others:
            other.terminate()
            await other.wait()
    return {
        "own_us_per_request": round(own_us, 2),
        "others_us_per_record": round((all_us - own_us) / (routers - 1), 2),
        "visible_ms_median": round(statistics.median(visible_ms), 1),
        "visible_ms_p99": _p99(visible_ms),
    }


async def _own_us(
    one: _Routed, publish: Callable[[int], None], rate: int, seconds: float
) -> tuple[float, float]:
    """Return the processor time of the load alone, and what its own records add to it."""
    idle, own = [], []
    for _ in range(_ROUNDS):  # in turn: other processes use the machine too
        idle.append(await _loop_us(lambda _number: None, rate, seconds / _ROUNDS))
        writing = asyncio.create_task(one.sharing.publisher.run_forever())
        own.append(await _loop_us(publish, rate, seconds / _ROUNDS))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    idle_us = statistics.median(idle)
    return idle_us, statistics.median(own) - idle_us


async def _loop_us(serve: Callable[[int], None], rate: int, seconds: float) -> float:
    """Call ``serve`` at a rate, and return the processor time for each call."""
    started_s, used_s, number = time.monotonic(), time.process_time(), 0
    while (passed_s := time.monotonic() - started_s) < seconds:
        while number < passed_s * rate:
            serve(number)
            number += 1
        await asyncio.sleep(_LOAD_STEP_S)
    return 1e6 * (time.process_time() - used_s) / number


async def _visible_ms(
    publish: Callable[[int], None], one: _Routed, index: SessionIndex, rate: int, seconds: float
) -> list[float]:
    """Measure the time from the end of a turn until another router finds it, under load."""
    times: list[float] = []

    async def probe() -> None:
        for number in itertools.count(_CHAINS):
            chain = _chain(number)
            one.publish(chain, _turn(number, random.Random(0)), None)
            ended_s = time.monotonic()
            while index.find(chain, time.monotonic()) is None:  # noqa: ASYNC110 - has no event
                await asyncio.sleep(_STEP_S)
            times.append(1e3 * (time.monotonic() - ended_s))

    probing = asyncio.create_task(probe())
    await _loop_us(publish, rate, seconds)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    return times


async def _filled(server: StoreServer, sessions: int, source: random.Random) -> dict[str, object]:
    """Measure the memory of many sessions, in the store and in a router that reads them."""
    config = _router("config.shared").SharedConfig(server.url, timeout_ms=60_000.0)
    store = _router("shared.store").Store(config, _TTL_S)
    now_ms = round(1e3 * await store.time_s())
    for number in range(_ALONE):
        await store.append(b"other", encode(_batch([number], source), 0.0), now_ms)
    alone_bytes = await store.size_bytes()
    for first in range(_ALONE, sessions, _BATCH):
        numbers = range(first, min(first + _BATCH, sessions))
        await store.append(b"other", encode(_batch(numbers, source), 0.0), now_ms)
    store_bytes = await store.size_bytes()
    await store.close()
    gc.collect()
    before_bytes, started_s = _resident_bytes(), time.monotonic()
    async with _running(_sharing(server, sessions)) as one:
        index = one.index
        took_s = time.monotonic() - started_s
        gc.collect()
        assert len(index) == sessions, "all have been read"
        router_bytes = _resident_bytes() - before_bytes
    return {
        "sessions": sessions,
        "router_bytes_per_session": round(router_bytes / sessions),
        "store_bytes_per_record": round((store_bytes - alone_bytes) / (sessions - _ALONE)),
        "store_bytes_per_record_alone": round(alone_bytes / _ALONE),
        "catch_up_s": round(took_s, 2),
    }


def _batch(numbers: Iterable[int], source: random.Random) -> Batch:
    return Batch(
        turns=tuple(
            SharedTurn(_chain(number).end, _turn(number, source), model=_MODEL)
            for number in numbers
        )
    )


@asynccontextmanager
async def _running(one: _Routed) -> AsyncIterator[_Routed]:
    """Run the tasks of a router, after it has read the store."""
    sharing = one.sharing
    tasks = [asyncio.create_task(work) for work in sharing.tasks()]
    await sharing.catch_up()
    if sharing.problems():
        raise PpdError(f"the store fails: {', '.join(sharing.problems())}")
    try:
        yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await sharing.close()


async def _write(url: str, rate: int, seconds: float) -> None:
    """Be another router, which serves ``rate`` requests a second."""
    source = random.Random(rate)
    turn = _turn(0, source)
    chains = [_chain(source.randrange(2**60)) for _ in range(_CHAINS)]
    async with _running(_sharing_of(url, 1)) as one:
        await _loop_us(
            lambda number: one.publish(chains[number % _CHAINS], turn, None),
            rate,
            seconds,
        )


def _p99(values: list[float]) -> float:
    return round(statistics.quantiles(values, n=100)[98], 2)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


if __name__ == "__main__":
    uvloop.run(_write(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
