"""``ppd-eval bench router-stages``: on what a request's time in our router is spent.

The router runs under Python's profiler, in a process of its own, before the workers of
``bench router``. Profiling slows Python's functions and not those in C, so the shares count, not
the times.
"""

from __future__ import annotations

import argparse
import json
import pstats
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from ..cluster import free_port, launching
from ..options import Commands, add_logs, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from .candidates import START_S, TABLE, Candidate
from .probe import Probe

# Functions that do not call each other: file, name, and the stage that they are.
_STAGES: Mapping[tuple[str, str], str] = {
    ("router/wire/reading.py", "feed"): "read the request",
    ("router/serving/handler.py", "_parse"): "check it, hash its prefixes",
    ("router/serving/handler.py", "_admit"): "admit it",
    ("router/serving/handler.py", "_plan"): "decide, name the workers",
    ("router/serving/sending.py", "send"): "send it to workers",
    ("router/wire/upstream.py", "data_received"): "read their answers",
    ("router/serving/handler.py", "_relay"): "answer the client",
    ("router/serving/handler.py", "_record"): "record it",
}
_CONNECTIONS, _TURNS = 32, 4


def add_to(commands: Commands) -> None:
    """Declare ``bench router-stages``."""
    parser = commands.add_parser(
        "router-stages",
        help="on what a request's time in our router is spent",
        description=(
            "Profile our router under first turns and under local turns. The last line is one "
            "JSON object: shares of the profiled time, by stage."
        ),
    )
    parser.add_argument("--requests", type=int, default=6400, help="of each kind")
    add_logs(parser)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Profile both kinds of turns, and print their shares.

    Returns:
        The exit status: 1 if a request failed.
    """
    shares, errors = {}, 0
    for kind in ("first", "local"):
        stats, failed = _profile(options.logs, kind, options.requests)
        shares[kind] = shares_of(stats)
        errors += failed
    line = {
        "part": "router-stages",
        **shares,
        "requests": options.requests,
        "errors": errors,
        **provenance(0),
    }
    if options.out is not None:
        append_whole(options.out, [line])
    print(json.dumps(line))
    return int(errors > 0)


def _profile(logs: Path, kind: str, requests: int) -> tuple[pstats.Stats, int]:
    """Return the profile of a router that has served turns of one kind, and its errors."""
    model = str(json.loads(TABLE.read_text())["model"])
    saved = (logs / f"router-{kind}.prof").resolve()
    with launching(logs) as launch:
        p, d, port = free_port(), free_port(), free_port()
        package = __package__.removesuffix(".routers")
        fakes = [sys.executable, "-m", f"{package}.fake_worker.paced", str(p), str(d), model]
        workers = launch.start("fake-workers", d, fakes)
        workers.wait_ready("/ready", time.monotonic() + START_S)
        router = launch.start(
            "profiled",
            port,
            [
                *(sys.executable, "-m", "cProfile", "-o", str(saved), "-m", "router.cli"),
                *("--port", str(port), "--table", str(TABLE), "--log-level", "warning"),
                *("--prefill", f"http://127.0.0.1:{p}", "--decode", f"http://127.0.0.1:{d}"),
            ],
        )
        router.wait_ready("/health", time.monotonic() + START_S)
        candidate = Candidate("profiled", router, port)
        uvloop.run(_serve(candidate, d, model, kind, requests))
        router.popen.terminate()  # it saves the profile when it ends
        router.popen.wait(START_S)
    return pstats.Stats(str(saved)), len(candidate.errors)


async def _serve(candidate: Candidate, direct: int, model: str, kind: str, requests: int) -> None:
    async with aiohttp.ClientSession() as http:
        probe = Probe(http, direct, model)
        if kind == "first":
            await probe.first_turns(candidate, _CONNECTIONS, requests)
            return
        for _ in range(requests // (_CONNECTIONS * _TURNS)):
            await probe.later_turns(candidate, _CONNECTIONS, _TURNS)


def shares_of(stats: Any) -> dict[str, float]:
    """Return each stage's share of the time outside of the event loop itself.

    Args:
        stats: a ``pstats.Stats``.
    """
    found = dict.fromkeys(_STAGES.values(), 0.0)
    busy = 0.0
    for (file, _, name), (_, _, own_s, all_s, _) in stats.stats.items():
        if name == "run" and file.endswith("asyncio/runners.py"):
            busy += all_s - own_s  # its own time is the event loop's, in C, with the idle time
        if name == "serve" and file.endswith("router/server/run.py"):
            busy -= all_s  # the start
        for (ends, stage_name), stage in _STAGES.items():
            if name == stage_name and file.endswith(ends):
                found[stage] += all_s
    return {stage: round(seconds / busy, 3) for stage, seconds in found.items()}
