"""``ppd-eval bench cores``: what the division of a machine's cores among workers is worth.

The cluster of ``serve``, a prefill and a decode worker on one machine without GPU, three times:

- ``undivided``: each worker takes all cores for its OpenMP threads, as torch does by itself;
- ``divided``: each takes its share, as the launcher divides them (``--cpu-threads``);
- ``pinned``: each takes its share, and its processes stay on cores of their own.

Every way serves one conversation alone, then several at once. The router sends every turn to the
prefill worker, so that all turns are remote ones. Each conversation has an opening of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.contract import Role
from ppd.errors import ConfigError

from . import real_model
from .chat import Conversation, connected
from .cluster import core_share, gpu_flags, launching, share_flags, wait_all
from .endpoints import empty_caches
from .options import Commands, add_out, cluster_options
from .provenance import provenance
from .raw_rows import append_whole
from .real_model import ServedModel

WAYS = ("undivided", "divided", "pinned")
_AT_ONCE = 5
_REPLY_TOKENS = 24
_OPENINGS = (
    "I am planning a week in Lisbon in October. What should I see first?",
    "My tomato plants have yellow leaves at the bottom. What can be the reason?",
    "Explain how a lighthouse lens sends its light so far out to sea.",
    "I want to bake bread without yeast today. Which recipe do you recommend?",
    "My old bicycle makes a clicking noise when I pedal. Where do I look?",
)
_LATER = ("Why is that so?", "What would you do next?", "Please sum it up in one sentence.")


@dataclass(frozen=True, slots=True)
class CoresTurn:
    """One measured turn.

    Attributes:
        threads: OpenMP threads of each worker.
        conversations: how many were held at once.
    """

    way: str
    threads: int
    conversations: int
    round: int
    conversation: int
    turn: int
    route: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float


def add_to(commands: Commands) -> None:
    """Declare ``bench cores``."""
    parser = commands.add_parser(
        "cores", parents=[cluster_options()], help="workers that share a machine's cores"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure all ways; the last line on stdout is one JSON object.

    Raises:
        ConfigError: the machine has GPUs.
        ClusterError: a process did not start.
        WorkerError: a turn failed.
    """
    if gpu_flags(0, 1):
        raise ConfigError("bench cores is for machines without GPU: there workers share no cores")
    served = real_model.choose(options.model)
    print(f"model: {served.description}", file=sys.stderr, flush=True)
    turns: list[CoresTurn] = []
    for way in options.ways:
        turns += asyncio.run(_measure(way, served, options.logs, options.rounds))
        print(f"  {way} is measured", file=sys.stderr, flush=True)
    if options.out is not None:
        origin = {"part": "cores", "model": Path(served.path).name, **provenance(0)}
        append_whole(options.out, [{**origin, **asdict(turn)} for turn in turns])
    print(json.dumps({"ways": summarize(turns)}))
    return 0


def summarize(turns: Sequence[CoresTurn]) -> list[dict[str, Any]]:
    """Return the TTFT of each way and number of conversations: median, lowest and highest."""
    rows = []
    for kind in dict.fromkeys((one.way, one.threads, one.conversations) for one in turns):
        row: dict[str, Any] = dict(zip(("way", "threads", "conversations"), kind, strict=True))
        some = [one for one in turns if (one.way, one.threads, one.conversations) == kind]
        for name, is_later in (("first", False), ("later", True)):
            values = [one.ttft_ms for one in some if (one.turn > 1) is is_later]
            row[f"{name}_ttft_ms"] = round(statistics.median(values), 1)
            row[f"{name}_ttft_range_ms"] = [round(min(values), 1), round(max(values), 1)]
        rows.append(row)
    return rows


async def _measure(way: str, served: ServedModel, logs: Path, rounds: int) -> list[CoresTurn]:
    cores = sorted(os.sched_getaffinity(0))
    share = core_share(2)
    threads = len(cores) if way == "undivided" else share
    turns: list[CoresTurn] = []
    with launching(logs) as launch:
        workers = []
        for index, role in enumerate((Role.PREFILL, Role.DECODE)):
            flags = [*served.worker_flags, *([] if way == "undivided" else share_flags(index, 2))]
            own = cores[index * share : (index + 1) * share] if way == "pinned" else None
            workers.append(launch.worker(role, served.path, *flags, core=own))
        wait_all(workers)
        router = launch.router(workers[:1], workers[1:], "--policy", "pd")
        wait_all([router])
        urls = [worker.url for worker in workers]
        async with aiohttp.ClientSession() as http:
            for number in range(-1, rounds):  # the first warms up, and is not counted
                for at_once in (1, _AT_ONCE):
                    await empty_caches(http, urls)
                    held = await asyncio.gather(
                        *(_hold(router.url, index) for index in range(at_once))
                    )
                    if number < 0:
                        continue
                    turns += [
                        CoresTurn(way, threads, at_once, number, index, turn, *result)
                        for index, results in enumerate(held)
                        for turn, result in enumerate(results, 1)
                    ]
    return turns


async def _hold(url: str, index: int) -> list[tuple[str, int, int, int, float]]:
    """Hold one conversation: route, prompt, reply and cached tokens, and TTFT of each turn."""
    results = []
    async with connected(url) as client:
        conversation = Conversation(client, _REPLY_TOKENS)
        for text in (_OPENINGS[index], *_LATER):
            one = await conversation.ask(text)
            counts = (one.prompt_tokens, one.completion_tokens, one.cached_tokens)
            results.append((one.route, *counts, round(one.ttft_ms, 1)))
    return results
