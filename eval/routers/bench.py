"""``ppd-eval bench router``: what a router costs, ours and others', before the same fake workers.

Every router has the same core, and takes its turn; workers and client share another. Requests are
first turns (prefill and decode leg) with short and with long histories, and for routers of ours
local turns (one leg). It measures CPU time of the router's processes, TTFT and ITL of clients, and
what the router adds to the TTFT of a worker asked directly. ``ours`` has its default options,
``ours_everything`` the optional parts as well (``everything.py``). ``ours_2_processes`` and
``ours_4_processes`` share a port, and here a core. The floors are no routers, they copy bytes:
``floor`` and ``floor_two_legs`` in Python (``splice.py``), ``floor_kernel`` in C with three system
calls a chunk (``splice.c``), ``floor_uring`` with fewer than one (``splice_uring.c``; it needs
liburing). ``baseline`` is the router of another checkout of this project. Its rounds are paired
with ours.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import aiohttp
import uvloop

from ppd.errors import ConfigError

from ..cluster import ClusterError, launching
from ..options import Commands, add_logs, add_out
from ..provenance import commit_of, provenance
from ..raw_rows import appending
from . import rivals as rival_routers
from .candidates import (
    NAMES,
    OTHER_CORE,
    PLANNING,
    START_S,
    TABLE,
    USUAL,
    Candidate,
    start,
    with_baselines,
)
from .load import LOADS, Load, one_core
from .probe import Loop, Probe, stream_costs
from .summary import paired, summarize

STREAMS = 32  # connections of the closed loop
SLICES = 25  # of the closed loop in a round
_LATER_TURNS = 4  # of each conversation whose local turns are measured
_LONG_SLICES, _LONG_CONNECTIONS, _LONG_REQUESTS = 3, 4, 24

T = TypeVar("T")


async def measure(
    candidates: Sequence[Candidate],
    probe: Probe,
    rounds: int,
    requests: int,
    loads: Sequence[Load],
) -> list[dict[str, object]]:
    """Measure all routers in turn; return a row for each router and round."""
    rows: list[dict[str, object]] = []
    for candidate in candidates:
        await until_ready(probe, candidate)
        await probe.first_turns(candidate, STREAMS, 640)
        await probe.first_tokens(candidate, 20)
        candidate.errors.clear()
        candidate.idle_mb = candidate.mb()
    for number in range(rounds):
        order = in_round(candidates, number)
        for row in await one_round(probe, order, number, requests, loads):
            rows.append(row)
            print(f"  {row}", file=sys.stderr, flush=True)
    return rows


def in_round(candidates: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: rotated, and reversed in every second round."""
    first = number // 2 % len(candidates)
    order = [*candidates[first:], *candidates[:first]]
    return order[::-1] if number % 2 else order


async def one_round(
    probe: Probe, order: Sequence[Candidate], number: int, requests: int, loads: Sequence[Load]
) -> list[dict[str, object]]:
    """Measure all routers once, and return their rows.

    They take turns in slices of each load, there and back: what else the machine does meets all of
    them alike.
    """
    slices: dict[str, defaultdict[str, list[float]]] = {c.name: defaultdict(list) for c in order}

    def taking_turns(count: int) -> Iterator[Candidate]:
        for i in range(count):
            yield from order[::-1] if i % 2 else order

    def add(candidate: Candidate, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            slices[candidate.name][name].append(value)

    for candidate in taking_turns(SLICES):
        add(candidate, _loop_costs(await probe.first_turns(candidate, STREAMS, requests // SLICES)))
    for candidate in taking_turns(SLICES):
        if candidate.name in PLANNING:
            loop = await probe.later_turns(candidate, STREAMS, _LATER_TURNS)
            add(candidate, {"cpu_us_per_local_turn": loop.cpu_us})
    for candidate in taking_turns(_LONG_SLICES):
        loop = await probe.long_turns(candidate, _LONG_CONNECTIONS, _LONG_REQUESTS)
        add(candidate, {"cpu_us_per_long_request": loop.cpu_us})
    for candidate in order:
        p50, p99 = await probe.first_tokens(candidate, 200)
        add(candidate, {"added_ttft_p50_ms": p50, "added_ttft_p99_ms": p99})
    for load in loads:
        for candidate in taking_turns(load.slices):
            window, replies = await probe.streams(candidate, load)
            add(candidate, stream_costs(load, window, replies))
            if load.streams >= 1000:
                more_mb = window.mb - candidate.idle_mb
                add(candidate, {"mb_per_1000_streams": 1e3 * more_mb / load.streams})
    return [_row(candidate, number, slices[candidate.name]) for candidate in order]


def _loop_costs(loop: Loop) -> dict[str, float]:
    took_ms = sorted(1e3 * s for s in loop.took_s)
    cuts = statistics.quantiles(took_ms, n=100, method="inclusive")
    return {
        "cpu_us_per_request": loop.cpu_us,
        "requests_per_s": loop.per_s,
        "core_use_requests": loop.cpu_us * loop.per_s / 1e6,
        "request_p50_ms": cuts[49],
        "request_p99_ms": cuts[98],
    }


def _row(
    candidate: Candidate, number: int, slices: Mapping[str, Sequence[float]]
) -> dict[str, object]:
    """Return a router's row of a round: means over slices, and the slices of CPU costs."""
    means = {name: statistics.fmean(parts) for name, parts in slices.items()}
    row: dict[str, object] = {
        "router": candidate.name,
        "round": number,
        **{name: round(value, 3) for name, value in {**means, **one_core(means)}.items()},
        "slices": {
            name: [round(part, 3) for part in parts]
            for name, parts in slices.items()
            if name.startswith("cpu_us")
        },
        "errors": len(candidate.errors),
    }
    if candidate.errors:
        row["errors_seen"] = sorted(set(candidate.errors))[:5]
    candidate.errors = []
    return row


async def until_ready(probe: Probe, candidate: Candidate) -> None:
    """Wait until a router answers a request.

    Raises:
        ClusterError: it does not, within a minute.
    """
    deadline_s = time.monotonic() + START_S
    problem = "it does not listen"
    while time.monotonic() < deadline_s:
        try:
            await probe.first_turns(candidate, 1, 1)
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
    parser.add_argument("--rounds", type=int, default=7)
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


async def _measured(
    candidates: Sequence[Candidate],
    direct: int,
    model: str,
    options: argparse.Namespace,
    loads: Sequence[Load],
) -> list[dict[str, object]]:
    async with aiohttp.ClientSession() as http:
        probe = Probe(http, direct, model)
        return await measure(candidates, probe, options.rounds, options.requests, loads)


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
        rows = uvloop.run(_measured(candidates, direct, model, options, loads))
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
