"""``ppd-eval bench router``: what a router costs, ours and others', before the same fake workers.

Every router has the same core, and takes its turn; workers and client share another. Each request
is a first turn: prefill and decode leg. It measures CPU time of the router's processes, and what
the router adds to the time to first token of a worker asked directly. ``ours`` has its default
options, ``ours_everything`` the optional parts as well (``everything.py``). The floors are no
routers, they copy bytes: ``floor`` and ``floor_two_legs`` in Python (``splice.py``),
``floor_kernel`` in C with three system calls a chunk (``splice.c``), ``floor_uring`` with fewer
than one (``splice_uring.c``; it needs liburing). ``baseline`` is the router of another checkout of
this project. Its rounds are paired with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import uvloop

from ppd.errors import ConfigError

from ..cluster import ClusterError, launching
from ..http_stream import Reply, Tally, connect_many, http_request
from ..options import Commands, add_logs, add_out
from ..provenance import commit_of, provenance
from ..raw_rows import appending
from . import rivals as rival_routers
from .candidates import (
    NAMES,
    OTHER_CORE,
    START_S,
    TABLE,
    USUAL,
    Candidate,
    start,
    with_baselines,
)
from .everything import KEY
from .summary import paired, summarize

_CHUNK = b'"content":" token"'

STREAMS = 32  # of the closed loop
SLICES = 25  # of the closed loop in a round

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that are open at once, each of ``chunks`` in bursts every ``interval_s``.

    Attributes:
        slices: a round measures the load so often, each time with as large a part of the chunks.
    """

    name: str
    streams: int
    chunks: int
    interval_s: float
    burst: int = 1
    window: float = 0.6  # of all chunks: counted when all streams are open, and none has ended
    slices: int = 1


LOADS = (
    Load("burst", 32, 512, 0.1, 32, slices=4),
    Load("paced_1", 1, 150, 0.02),
    Load("paced_64", 64, 150, 0.02),
    Load("paced", 512, 150, 0.02, slices=3),
    Load("open_4096", 4096, 16, 0.5),
)


class Bench:
    """Sends requests to routers, and measures what they cost.

    Args:
        direct: port of the decode worker itself.
    """

    def __init__(self, http: aiohttp.ClientSession, direct: int, model: str) -> None:
        self._http = http
        self._direct = direct
        self._model = model
        self._asked = 0

    async def closed_loop(self, candidate: Candidate, streams: int, requests: int) -> float:
        """Return the CPU microseconds of a request that does not stream."""
        each = requests // streams
        connections = await connect_many(candidate.port, streams, Tally(), _CHUNK)

        async def ask(connection: int) -> list[Reply]:
            link = connections[connection]
            return [await link.ask(self._request(1, False)) for _ in range(each)]

        before_s = candidate.cpu_s()
        answers = await asyncio.gather(*(ask(i) for i in range(streams)))
        spent_s = candidate.cpu_s() - before_s
        for of_one in answers:
            candidate.note(of_one, 1)
        for link in connections:
            link.close()
        return 1e6 * spent_s / (each * streams)

    async def streams(self, candidate: Candidate, load: Load) -> tuple[float, float]:
        """Measure streams that are all open at once.

        Returns:
            The CPU microseconds of a chunk, and the memory then, in MiB.
        """
        chunks = load.chunks // load.slices
        rhythm = {"interval_s": load.interval_s, "burst": load.burst}
        async with self._http.post(f"http://127.0.0.1:{self._direct}/rhythm", json=rhythm):
            pass
        tally = Tally()
        connections = await connect_many(candidate.port, load.streams, tally, _CHUNK)
        asked = [asyncio.create_task(link.ask(self._request(chunks, True))) for link in connections]
        every = asyncio.gather(*asked)
        await tally.reached(load.streams, 0, every)
        before_s, first = candidate.cpu_s(), tally.chunks
        last = first + load.window * (load.streams * chunks - first)
        await tally.reached(0, int(last), every)
        counted = tally.chunks - first
        spent_s, mb = candidate.cpu_s() - before_s, candidate.mb()
        candidate.note(await every, chunks)
        for link in connections:
            link.close()
        return 1e6 * spent_s / max(1, counted), mb

    async def first_tokens(self, candidate: Candidate, pairs: int) -> tuple[float, float]:
        """Measure what a router adds to the time to the first token.

        Returns:
            p50 and p99, over the p50 of the worker asked directly, in ms.
        """
        async with self._http.post(
            f"http://127.0.0.1:{self._direct}/rhythm", json={"interval_s": 0.0, "burst": 2}
        ):
            pass
        took: dict[int, list[float]] = defaultdict(list)
        tally = Tally()
        links = {
            port: (await connect_many(port, 1, tally, _CHUNK))[0]
            for port in (candidate.port, self._direct)
        }
        for link in links.values():
            link.acknowledges_at_once = True  # else Nagle's algorithm costs some of them 40 ms
        for _ in range(pairs):
            for port, link in links.items():
                answer = await link.ask(self._request(2, True))
                took[port].append(1e3 * answer.ttft_s)
                if port == candidate.port:
                    candidate.note([answer], 2)
        for link in links.values():
            link.close()
        cuts = statistics.quantiles(took[candidate.port], n=100)
        direct = statistics.median(took[self._direct])
        return cuts[49] - direct, cuts[98] - direct

    def _request(self, chunks: int, stream: bool) -> bytes:
        """Return a request that opens a conversation: no two are alike."""
        self._asked += 1
        body = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. " * 20},
                {"role": "user", "content": f"Question {self._asked}."},
            ],
            "max_tokens": chunks,
            "temperature": 0,
            "stream": stream,
        }
        key = f"Authorization: Bearer {KEY}\r\n"
        return http_request("/v1/chat/completions", json.dumps(body).encode(), headers=key)


async def measure(
    candidates: Sequence[Candidate],
    direct: int,
    model: str,
    rounds: int,
    requests: int,
    loads: Sequence[Load],
) -> list[dict[str, object]]:
    """Measure all routers in turn; return a row for each router and round."""
    rows: list[dict[str, object]] = []
    async with aiohttp.ClientSession() as http:
        bench = Bench(http, direct, model)
        for candidate in candidates:
            await until_ready(bench, candidate)
            await bench.closed_loop(candidate, STREAMS, 640)
            await bench.first_tokens(candidate, 20)
            candidate.errors.clear()
            candidate.idle_mb = candidate.mb()
        for number in range(rounds):
            order = in_round(candidates, number)
            for row in await one_round(bench, order, number, requests, loads):
                rows.append(row)
                print(f"  {row}", file=sys.stderr, flush=True)
    return rows


def in_round(candidates: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: rotated, and reversed in every second round."""
    first = number // 2 % len(candidates)
    order = [*candidates[first:], *candidates[:first]]
    return order[::-1] if number % 2 else order


async def one_round(
    bench: Bench, order: Sequence[Candidate], number: int, requests: int, loads: Sequence[Load]
) -> list[dict[str, object]]:
    """Measure all routers once, and return their rows.

    They take turns in slices of each load, there and back: what else the machine does meets all of
    them alike.
    """
    rows: list[dict[str, object]] = [{"router": c.name, "round": number} for c in order]
    turns = list(zip(order, rows, strict=True))

    def taking_turns(count: int) -> Iterator[tuple[Candidate, dict[str, object]]]:
        for i in range(count):
            yield from turns[::-1] if i % 2 else turns

    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for candidate, _ in taking_turns(SLICES):
        us = await bench.closed_loop(candidate, STREAMS, requests // SLICES)
        spent[candidate.name, "cpu_us_per_request"].append(us)
    for candidate, row in turns:
        added = await bench.first_tokens(candidate, 200)
        row["added_ttft_p50_ms"], row["added_ttft_p99_ms"] = added
    for load in loads:
        for candidate, row in taking_turns(load.slices):
            us, mb = await bench.streams(candidate, load)
            spent[candidate.name, f"cpu_us_per_chunk_{load.name}"].append(us)
            if load.streams >= 1000:
                row["mb_per_1000_streams"] = 1e3 * (mb - candidate.idle_mb) / load.streams
    for candidate, row in turns:
        slices: dict[str, list[float]] = {}
        for (name, cost), parts in spent.items():
            if name == candidate.name:
                row[cost] = statistics.fmean(parts)
                slices[cost] = [round(part, 3) for part in parts]
        row["slices"] = slices
    for candidate, row in turns:
        row["errors"] = len(candidate.errors)
        if candidate.errors:
            row["errors_seen"] = sorted(set(candidate.errors))[:5]
        candidate.errors = []
    return [
        {name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}
        for row in rows
    ]


async def until_ready(bench: Bench, candidate: Candidate) -> None:
    """Wait until a router answers a request.

    Raises:
        ClusterError: it does not, within a minute.
    """
    deadline_s = time.monotonic() + START_S
    problem = "it does not listen"
    while time.monotonic() < deadline_s:
        try:
            await bench.closed_loop(candidate, 1, 1)
        except OSError:
            pass
        else:
            if not candidate.errors:
                return
            problem = candidate.errors[-1]
        candidate.errors.clear()
        await asyncio.sleep(0.2)
    raise ClusterError(f"{candidate.name} is not ready: {problem}{candidate.process.tail()}")


def add_to(commands: Commands) -> None:
    """Declare ``bench router``."""
    parser = commands.add_parser(
        "router",
        help="what a router costs, ours and others'",
        description=(
            "Measure CPU time, added TTFT and memory of routers before the same fake "
            "workers, and of a program that only copies bytes. The routers are this one, "
            "SMG, sglang-router and mini_lb. The last line is one JSON object."
        ),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3200, help="requests of the closed loop")
    parser.add_argument("--routers", nargs="+", default=USUAL, choices=NAMES)
    parser.add_argument(
        "--rivals",
        type=Path,
        default=Path(".run/rivals"),
        help="the environment that the others are installed in, on the first run",
    )
    loads = [load.name for load in LOADS]
    parser.add_argument(
        "--loads", nargs="*", default=loads, choices=loads, help="none: requests and TTFT alone"
    )
    parser.add_argument(
        "--compiled",
        type=Path,
        default=Path(".run/compiled"),
        help="where our router is compiled to, when its source has changed",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="TREE",
        help="another checkout of this project: its router is compared with ours, round by round",
    )
    add_logs(parser)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the chosen routers; print one JSON object as the last line.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: the baseline is no checkout, or is compared with no router of ours; or there
            are too few requests for the closed loop.
    """
    if options.requests < SLICES * STREAMS:
        least = SLICES * STREAMS
        raise ConfigError(f"--requests must be at least {least}, got {options.requests}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loads = [load for load in LOADS if load.name in options.loads]
    names = list(options.routers)
    if options.baseline is not None:
        names = with_baselines(names, options.baseline)
    model = str(json.loads(TABLE.read_text())["model"])
    with appending(options.out) as write, launching(options.logs) as launch:
        os.sched_setaffinity(0, {OTHER_CORE})
        candidates, direct = start(launch, model, names, options)
        rows = uvloop.run(
            measure(candidates, direct, model, options.rounds, options.requests, loads)
        )
        about: dict[str, object] = {"loads": [asdict(load) for load in loads]}
        about |= rival_routers.VERSIONS
        if options.baseline is not None:
            about["baseline_commit"] = commit_of(options.baseline)
        for row in rows:
            write({**row, **about, **provenance(0)})
    summary = summarize(rows)
    failed = any(values["errors"] for values in summary.values())
    ratios = paired(rows)
    print(json.dumps({**summary, **({"paired": ratios} if ratios else {})}))
    return int(failed)
