"""``ppd-eval bench speculation``: decodes that speculate, beside one append.

Two decode workers share a core, one at work at a time. One runs chunks between decode steps. The
other measures both kinds of chunks and takes the cheaper one. ``delta`` sends the append through
the prefill worker. TPOT is the time of a token that a client gets, from the send of the append to
its first token; ``quiet`` is that of the same decodes just before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.contract import Role

from ..cluster import Process, launching, wait_all
from ..draft_model import DraftSpec, draft_flags, ensure_pair
from ..endpoints import empty_caches, vocabulary_of
from ..options import Commands, add_out, cluster_options
from ..provenance import provenance
from ..raw_rows import appending
from ..tiny_model import ModelSpec
from .client import EngineClient, Reply, bootstrap_port_of, plugin_state_of, tpot_ms

_KV = ("--max-total-tokens", "65536")
_WAYS = ("alternating", "chosen", "delta")
_CELLS = ((2, 1024, 512), (6, 1024, 512), (6, 4096, 512), (6, 4096, 2048))
# One layer, as the draft is that layer; wide, so that its forward outweighs the scheduler.
_SPEC = DraftSpec(ModelSpec(hidden=768, heads=12, kv_heads=4))


@dataclass(frozen=True, slots=True)
class Row:
    """One append, and the decodes beside it.

    Attributes:
        tokens_per_event: of the decodes before the append: their accept length.
        chunks: of the append; 0 for ``delta``.
    """

    round: int
    decodes: int
    context: int
    new: int
    way: str
    ttft_ms: float
    quiet_tpot_ms: float
    tpot_ms: float
    tokens_per_event: float
    chunks: int


def add_to(commands: Commands) -> None:
    """Declare ``bench speculation``."""
    parser = commands.add_parser(
        "speculation",
        parents=[cluster_options()],
        help="decodes that speculate, beside an append",
        description="Measure the TPOT of speculating decodes beside one append, by its way.",
    )
    parser.add_argument("--rounds", type=int, default=7)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and append raw rows; the last line on stdout is one JSON object."""
    target, draft = ensure_pair(_SPEC)
    flags = (*draft_flags(draft, _SPEC.algorithm),)
    rows: list[Row] = []
    with appending(options.out) as write, launching(options.logs) as launch:
        prefill = launch.worker(Role.PREFILL, target, *_KV, *flags, core=0)
        workers = {
            way: launch.worker(Role.DECODE, target, *_KV, *flags, *more, name=way, core=1)
            for way, more in (("alternating", ("--ppd-alternate",)), ("chosen", ()))
        }
        wait_all([prefill, *workers.values()])

        def measured(row: Row) -> None:
            rows.append(row)
            origin = {"model": Path(target).parent.name, **provenance(0)}
            write({"part": "speculation", **asdict(row), **origin})

        asyncio.run(_measure(prefill, workers, options.rounds, measured))
    print(json.dumps({"cells": list(summarize(rows))}))
    return 0


async def _measure(
    prefill: Process, workers: dict[str, Process], rounds: int, measured: Callable[[Row], None]
) -> None:
    source = random.Random(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        vocabulary = await vocabulary_of(http, prefill.url)
        port = await bootstrap_port_of(http, prefill.url)
        for number in range(-2, rounds):  # the first two only warm up
            cells = [(*cell, way) for cell in _CELLS for way in _WAYS]
            source.shuffle(cells)
            for decodes, context, new, way in cells:
                worker = workers["alternating" if way == "delta" else way]
                await empty_caches(http, [prefill.url, worker.url])
                client = EngineClient(http, prefill.url, worker.url, port, source)
                found = await _one(client, vocabulary, decodes, context, new, way == "delta")
                if number >= 0:
                    measured(Row(number, decodes, context, new, way, *found))
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)


async def _one(
    client: EngineClient, vocabulary: range, decodes: int, context: int, new: int, remote: bool
) -> tuple[float, float, float, float, int]:
    def tokens(n: int) -> list[int]:
        return client.rooms.choices(vocabulary, k=n)

    history = tokens(context)
    history += (await client.remote(history, 2)).ids
    prompt = history + tokens(new)
    async with client.decoding([tokens(64) for _ in range(decodes)], max_tokens=20_000) as running:
        begun = max(len(reply.arrived_s) for reply in running)
        for reply in running:
            await reply.reaches(begun + 24)
        from_s = max(reply.arrived_s[begun + 3] for reply in running)
        before = (await plugin_state_of(client.http, client.decode_url))["chunks"]
        quiet = tpot_ms(running, from_s, min(reply.arrived_s[-1] for reply in running))
        per_event = statistics.fmean(map(_tokens_per_event, running))
        append = await (client.remote(prompt, 2) if remote else client.local(prompt, 2))
        for reply in running:
            await reply.reaches(len(reply.arrived_s) + 1)
        beside = tpot_ms(running, append.sent_s, append.arrived_s[0])
        after = (await plugin_state_of(client.http, client.decode_url))["chunks"]
    return append.ttft_ms, quiet, beside, per_event, after - before


def _tokens_per_event(reply: Reply) -> float:
    return (reply.tokens[-1] - reply.tokens[0]) / (len(reply.tokens) - 1)


def summarize(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Return medians of each cell and way, and the ratio of TPOT to that before the append."""
    keys = sorted({(row.decodes, row.context, row.new, row.way) for row in rows})
    for decodes, context, new, way in keys:
        key = (decodes, context, new, way)
        of = [r for r in rows if (r.decodes, r.context, r.new, r.way) == key]
        yield {
            "decodes": decodes,
            "context": context,
            "new": new,
            "way": way,
            "ttft_ms": round(statistics.median(r.ttft_ms for r in of), 2),
            "quiet_tpot_ms": round(statistics.median(r.quiet_tpot_ms for r in of), 3),
            "tpot_ms": round(statistics.median(r.tpot_ms for r in of), 3),
            "ratio": round(statistics.median(r.tpot_ms / r.quiet_tpot_ms for r in of), 3),
            "tokens_per_event": round(statistics.median(r.tokens_per_event for r in of), 2),
        }
