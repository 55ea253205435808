"""``ppd-eval bench engine``: what a later turn costs on each way, and the decodes beside it.

Prefill and decode worker have a core each. ``full`` transfers all of the KV, ``delta`` what the
decode worker does not hold, ``local`` appends there. Two decode workers share their core, one at
work at a time: ``bounded`` has chunks as ``ppd-worker`` sets them, and ``unbounded`` appends in one
chunk, alternating with decodes. All is interleaved in one run. Then both ways are measured under
load, through the router, with conversations that arrive open loop. That part has a larger model:
the small one would have nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ppd.contract import Role
from ppd.pacing import MIN_SLOWDOWN

from .. import tiny_model
from ..client import hold
from ..cluster import Launcher, Process, gpu_flags, launching, wait_all
from ..endpoints import empty_caches, vocabulary_of
from ..options import Commands, add_out, cluster_options
from ..provenance import provenance
from ..raw_rows import appending
from ..tiny_model import ModelSpec
from .client import EngineClient, Reply, bootstrap_port_of, gaps_ms, plugin_state_of
from .loaded import arrivals, load, median, summarize_load

_LOADED_MODEL = ModelSpec(layers=8, hidden=512, heads=8, kv_heads=4)
WAYS = ("full", "delta", "local")
_KV = ("--max-total-tokens", "131072")
_OUTPUT = 16
_DECODES = 6
_GRID = [(context, new) for context in (1024, 4096, 8192) for new in (64, 256)]
_LONG = (4096, 3000)  # beside decodes only: the gap it makes


@dataclass(frozen=True, slots=True)
class Row:
    """One measured turn, and the TPOT of the decodes beside it.

    Attributes:
        quiet_tpot_ms: of the decodes, just before the turn was sent.
        bg_tpot_ms: of the decodes, until its first token.
        reply_tpot_ms: of the decodes, until its last token.
    """

    round: int
    context: int
    new: int
    background: int
    bounded: bool
    way: str
    ttft_ms: float
    cached_tokens: int
    bg_tpot_ms: float | None
    reply_tpot_ms: float | None
    quiet_tpot_ms: float | None
    max_gap_ms: float | None
    decode_step_ms: float | None


@dataclass(slots=True)
class Bench:
    """Sends turns to one prefill worker and two decode workers."""

    http: aiohttp.ClientSession
    prefill: Process
    decodes: dict[bool, Process]  # by whether it is bounded
    vocabulary: range
    bootstrap_port: int
    source: random.Random
    rows: list[Row] = field(default_factory=list)

    def client(self, bounded: bool) -> EngineClient:
        """Return the client of the decode worker that bounds chunks, or of the other."""
        urls = self.prefill.url, self.decodes[bounded].url
        return EngineClient(self.http, *urls, self.bootstrap_port, self.source)

    def tokens(self, n: int) -> list[int]:
        """Return so many random token ids."""
        return self.source.choices(self.vocabulary, k=n)

    async def empty(self) -> None:
        """Empty the caches of all workers."""
        await empty_caches(self.http, [self.prefill.url, *(d.url for d in self.decodes.values())])

    async def round(self, number: int) -> None:
        """Measure every cell once, in random order; the turns of a cell share one first turn."""
        contexts: dict[int, list[int]] = defaultdict(list)
        for context, new in _GRID:
            contexts[context].append(new)
        blocks = [
            (context, news, background, bounded)
            for context, news in contexts.items()
            for background in (0, _DECODES)
            for bounded in self.decodes
        ]
        blocks += [(_LONG[0], [_LONG[1]], _DECODES, bounded) for bounded in self.decodes]
        self.source.shuffle(blocks)
        for context, news, background, bounded in blocks:
            await self.empty()
            await self._block(number, context, news, background, bounded)

    async def _block(
        self, number: int, context: int, news: Sequence[int], background: int, bounded: bool
    ) -> None:
        client = self.client(bounded)
        history = self.tokens(context - _OUTPUT)
        history += (await client.remote(history, _OUTPUT)).ids
        turns = [(new, way) for new in news for way in WAYS]
        self.source.shuffle(turns)
        prompts = [self.tokens(64) for _ in range(background)]
        async with client.decoding(prompts, max_tokens=8000) as decoding:
            for new, way in turns:
                quiet = await _quiet(decoding)
                prompt = history + self.tokens(new)
                reply = await _send(client, way, prompt, context)
                state = await plugin_state_of(self.http, self.decodes[bounded].url)
                beside, until_last = (
                    [gap for r in decoding for gap in gaps_ms(r, reply.sent_s, to_s)]
                    for to_s in (reply.arrived_s[0], reply.arrived_s[-1])
                )
                self.rows.append(
                    Row(
                        number,
                        context,
                        new,
                        background,
                        bounded,
                        way,
                        reply.ttft_ms,
                        reply.cached_tokens,
                        _mean(beside),
                        _mean(until_last),
                        quiet,
                        max(beside, default=None),
                        state["decode_step_ms"],
                    )
                )


async def _quiet(decoding: list[Reply]) -> float | None:
    """TPOT of the background with nothing else to do; waits until it has been seen."""
    if not decoding:
        return None
    begun = [len(reply.arrived_s) for reply in decoding]
    for reply, n in zip(decoding, begun, strict=True):
        await reply.reaches(n + 12)
    # The first gaps still hold the end of the turn before.
    return _mean(
        [
            gap
            for reply, n in zip(decoding, begun, strict=True)
            for gap in gaps_ms(reply, reply.arrived_s[n + 3], reply.arrived_s[n + 11])
        ]
    )


async def _send(client: EngineClient, way: str, prompt: list[int], context: int) -> Reply:
    if way == "local":
        # Of the context all but the last generated token, which was never an input.
        return await client.local(prompt, _OUTPUT, min_cached=context - 1)
    return await client.remote(prompt, _OUTPUT, whole=way == "full")


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def start_workers(
    launch: Launcher, model: str, target_ms: float | None = None
) -> tuple[Process, dict[bool, Process]]:
    """A prefill worker, and a bounded and an unbounded decode worker that share a core or GPU."""
    prefill_gpu, decode_gpu = gpu_flags(0, 3), gpu_flags(1, 3)
    cores = (0, 1) if not prefill_gpu else (None, None)
    prefill = launch.worker(Role.PREFILL, model, *_KV, *prefill_gpu, core=cores[0])
    target = () if target_ms is None else ("--ppd-tpot-target-ms", str(target_ms))
    bounded = launch.worker(
        Role.DECODE, model, *_KV, *decode_gpu, *target, name="bounded", core=cores[1]
    )
    launch.environment["PPD_APPEND_CHUNK"] = "16384"
    unbounded = launch.worker(
        Role.DECODE,
        model,
        *(*_KV, *decode_gpu, "--ppd-alternate", "--chunked-prefill-size", "16384"),
        name="unbounded",
        core=cores[1],
    )
    del launch.environment["PPD_APPEND_CHUNK"]
    wait_all([prefill, bounded, unbounded])
    return prefill, {True: bounded, False: unbounded}


def summarize(rows: Sequence[Row], target_ms: float | None = None) -> Iterator[dict[str, Any]]:
    """A cell for each context, new tokens, background and bound; medians.

    Args:
        target_ms: that the bounded worker was given; else its own, a multiple of its decode step.
    """
    cells: dict[tuple[int, int, int, bool], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row.context, row.new, row.background, row.bounded].append(row)
    for (context, new, background, bounded), measured in sorted(cells.items()):
        cell: dict[str, Any] = {
            "context": context,
            "new": new,
            "background": background,
            "bounded": bounded,
        }
        for way in WAYS:
            of_way = [row for row in measured if row.way == way]
            cell[f"{way}_ttft_ms"] = median([row.ttft_ms for row in of_way])
            ratios = [
                (row.bg_tpot_ms / row.quiet_tpot_ms, row.reply_tpot_ms / row.quiet_tpot_ms)
                for row in of_way
                if row.bg_tpot_ms and row.reply_tpot_ms and row.quiet_tpot_ms
            ]
            cell[f"{way}_bg_tpot_ratio"] = median([first for first, _ in ratios])
            cell[f"{way}_reply_tpot_ratio"] = median([whole for _, whole in ratios])
        local = [row for row in measured if row.way == "local"]
        cell["max_decode_gap_ms"] = median([r.max_gap_ms for r in local if r.max_gap_ms])
        cell["decode_step_ms"] = step = median([r.quiet_tpot_ms for r in local if r.quiet_tpot_ms])
        own_ms = None if step is None else round(MIN_SLOWDOWN * step, 2)
        cell["tpot_target_ms"] = target_ms if bounded and target_ms else own_ms
        yield cell


# -- the command ------------------------------------------------------------------------------


def add_to(commands: Commands) -> None:
    """Declare ``bench engine``."""
    parser = commands.add_parser(
        "engine",
        parents=[cluster_options()],
        help="full transfer, delta transfer and local append",
        description=(
            "Compare full transfer, delta transfer and local append: idle, beside decodes, "
            "and under load. The last line is one JSON object."
        ),
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every cell")
    parser.add_argument("--tpot-target-ms", type=float, help="TPOT target of the bounded worker")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="seeds of the loaded part"
    )
    parser.add_argument(
        "--conversations", type=int, default=24, help="conversations of each loaded run"
    )
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table; the last line on stdout is one JSON object."""
    model, rounds, target_ms = options.model, options.rounds, options.tpot_target_ms
    seeds, conversations = options.seeds, options.conversations
    out, logs = options.out, options.logs
    cells: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    if rounds:
        path = tiny_model.resolve(model)
        with appending(out) as write, launching(logs) as launch:
            prefill, decodes = start_workers(launch, path, target_ms)
            rows = asyncio.run(_measure_cells(prefill, decodes, rounds))
            for row in rows:
                write({**_origin("cells", path), **asdict(row), "target_ms": target_ms})
        cells = list(summarize(rows, target_ms))
        _print(cells)
    if seeds:
        path = model or str(tiny_model.ensure(_LOADED_MODEL))
        with appending(out) as write, launching(logs) as launch:
            prefill, decodes = start_workers(launch, path)
            routers = {
                way: launch.router([prefill], [decodes[True]], "--policy", policy)
                for way, policy in (("delta", "pd"), ("local", "full"))
            }
            wait_all(list(routers.values()))
            loaded = asyncio.run(_measure_load(prefill, decodes, routers, seeds, conversations))
            for turn in loaded:
                write({**_origin("loaded", path), **turn})
        rates = list(summarize_load(loaded))
        _print(rates)
    print(json.dumps({"cells": cells, "loaded": rates}))
    return 0


@asynccontextmanager
async def _bench(prefill: Process, decodes: dict[bool, Process]) -> AsyncIterator[Bench]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        vocabulary = await vocabulary_of(http, decodes[True].url)
        port = await bootstrap_port_of(http, prefill.url)
        yield Bench(http, prefill, decodes, vocabulary, port, random.Random(0))


async def _measure_cells(prefill: Process, decodes: dict[bool, Process], rounds: int) -> list[Row]:
    async with _bench(prefill, decodes) as bench:
        await bench.round(-1)  # kernels warm up, step times are learned: not measured
        bench.rows.clear()
        for number in range(rounds):
            await bench.round(number)
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        return bench.rows


async def _measure_load(
    prefill: Process,
    decodes: dict[bool, Process],
    routers: dict[str, Process],
    seeds: Sequence[int],
    conversations: int,
) -> list[dict[str, Any]]:
    async with _bench(prefill, decodes) as bench:
        for router in routers.values():
            warm = arrivals(1.0, -1, 3)
            await hold(router.url, warm, seed="warm", vocabulary=bench.vocabulary)
        workers = [prefill, *decodes.values()]
        return await load(bench.http, routers, workers, bench.vocabulary, seeds, conversations)


def _origin(part: str, model: str) -> dict[str, Any]:
    return {"part": part, "model": Path(model).name, **provenance(0)}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    def show(value: object) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    table = [names, *([show(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(names))]
    for row in table:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    print()
