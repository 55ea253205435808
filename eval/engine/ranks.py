"""``ppd-eval bench ranks``: servers with DP attention and two ranks.

Three parts, each interleaved. ``peers``: TPOT of decodes on one rank, beside an append on that rank
and beside one on the other rank, against the same decodes just before. ``hooks``: TPOT of remote
turns on a server with the plugin, and on one with SGLang's own radix cache. ``prefill``: the share
of a conversation's prefix that a prefill server finds, with bootstrap rooms by chance and with
rooms of one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.contract import Role

from .. import tiny_model
from ..cluster import Launcher, Process, launching, wait_all
from ..endpoints import empty_caches, vocabulary_of
from ..options import Commands, add_out, cluster_options
from ..provenance import provenance
from ..raw_rows import appending
from ..tiny_layers import Family
from ..tiny_model import ModelSpec
from .client import EngineClient, Reply, bootstrap_port_of, gaps_ms

_MODEL = ModelSpec(family=Family.DEEPSEEK_V3)
_RANKS = 2
_ONE_THREAD = ("--cpu-threads", "1")  # of each rank
_FLAGS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
_KV = ("--max-total-tokens", "65536")
# As ppd-worker has it, but without the plugin.
_STOCK = ("--ppd-plain", "--disaggregation-decode-enable-radix-cache", "--enable-mixed-chunk")
_BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # else SGLang needs a NUMA node for each rank
_DECODES = 4
_APPENDS = ((1024, 256), (1024, 2048))  # context and new tokens
_WAYS = ("own rank", "peer")
_HOOKS = ("plugin", "stock")
_REMOTE = (256, 120)  # tokens of prompt and reply
_ROOMS = ("by chance", "of one rank")
_CONVERSATIONS, _TURNS, _TURN_TOKENS = 8, 4, 256


@dataclass(frozen=True, slots=True)
class Peers:
    """One append, and the decodes of rank 0 beside it."""

    round: int
    context: int
    new: int
    way: str
    ttft_ms: float
    quiet_tpot_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Hooks:
    """Decodes on both ranks of a server."""

    round: int
    way: str
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """Later turns of some conversations on a prefill server.

    Attributes:
        prefix_tokens: of their prompts, that an earlier turn has prefilled.
        cached_tokens: of these, found by the engine's own count.
    """

    round: int
    way: str
    prefix_tokens: int
    cached_tokens: int


def add_to(commands: Commands) -> None:
    """Declare ``bench ranks``."""
    parser = commands.add_parser(
        "ranks",
        parents=[cluster_options()],
        help="servers with DP attention",
        description=(
            "Measure decodes beside an append on another rank, the cost of the plugin, and what "
            "ranks of a prefill server find. The last line is one JSON object."
        ),
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and append raw rows; the last line on stdout is one JSON object."""
    model = str(tiny_model.ensure(_MODEL))
    rows: list[Peers | Hooks | Prefill] = []
    with appending(options.out) as write:
        for part in options.parts:
            with launching(options.logs) as launch:
                for row in _PARTS[part](launch, model, options.rounds):
                    rows.append(row)
                    origin = {"model": Path(model).name, **provenance(0)}
                    write({"part": type(row).__name__.lower(), **asdict(row), **origin})
    print(json.dumps(summarize(rows)))
    return 0


def _start(launch: Launcher, model: str, role: Role, name: str, *flags: str) -> Process:
    before = launch.environment
    launch.environment = {**before, **_BOUND}
    try:
        return launch.worker(role, model, *_KV, *_FLAGS, *_ONE_THREAD, *flags, name=name)
    finally:
        launch.environment = before


def _session() -> aiohttp.ClientSession:
    # A server that was stopped closes the connections that it had.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


# -- decodes beside an append ------------------------------------------------------------------


def _peers(launch: Launcher, model: str, rounds: int) -> Iterator[Peers]:
    decode = _start(launch, model, Role.DECODE, "ranks")
    wait_all([decode])
    yield from asyncio.run(_measure_peers(decode, rounds))


async def _measure_peers(decode: Process, rounds: int) -> list[Peers]:
    source, rows = random.Random(0), []
    async with _session() as http:
        vocabulary = await vocabulary_of(http, decode.url)
        for number in range(-2, rounds):  # the first two only warm up
            cells = [(*sizes, way) for sizes in _APPENDS for way in _WAYS]
            source.shuffle(cells)
            for context, new, way in cells:
                await empty_caches(http, [decode.url])
                running, appending = (
                    EngineClient(http, "", decode.url, 0, source, {"routed_dp_rank": rank})
                    for rank in (0, int(way == "peer"))
                )
                found = await _one_append(running, appending, vocabulary, context, new)
                if number >= 0:
                    rows.append(Peers(number, context, new, way, *found))
            _report("peers", number, rounds)
    return rows


async def _one_append(
    running: EngineClient, appending: EngineClient, vocabulary: range, context: int, new: int
) -> tuple[float, float, float]:
    source = running.rooms

    def tokens(n: int) -> list[int]:
        return source.choices(vocabulary, k=n)

    history = tokens(context)
    await appending.local(history, 1)
    prompts = [tokens(64) for _ in range(_DECODES)]
    async with running.decoding(prompts, max_tokens=20_000) as replies:
        begun = max(len(reply.arrived_s) for reply in replies)
        for reply in replies:
            await reply.reaches(begun + 24)
        quiet_ms = _tpot(replies, replies[0].arrived_s[begun + 3], replies[0].arrived_s[-1])
        append = await appending.local(history + tokens(new), 1)
        for reply in replies:
            await reply.reaches(len(reply.arrived_s) + 1)
        beside_ms = _tpot(replies, append.sent_s, append.arrived_s[0])
    return append.ttft_ms, quiet_ms, beside_ms


def _tpot(replies: Sequence[Reply], from_s: float, to_s: float) -> float:
    return statistics.fmean(gap for reply in replies for gap in gaps_ms(reply, from_s, to_s))


# -- the plugin against SGLang -----------------------------------------------------------------


def _hooks(launch: Launcher, model: str, rounds: int) -> Iterator[Hooks]:
    prefill = launch.worker(Role.PREFILL, model, *_KV, *_ONE_THREAD)
    decode = {
        "plugin": _start(launch, model, Role.DECODE, "plugin"),
        "stock": _start(launch, model, Role.DECODE, "stock", *_STOCK),
    }
    wait_all([prefill, *decode.values()])
    yield from asyncio.run(_measure_hooks(prefill, decode, rounds))


async def _measure_hooks(prefill: Process, decode: dict[str, Process], rounds: int) -> list[Hooks]:
    source, rows = random.Random(0), []
    async with _session() as http:
        vocabulary = await vocabulary_of(http, prefill.url)
        port = await bootstrap_port_of(http, prefill.url)
        for number in range(-2, rounds):
            for way in source.sample(_HOOKS, len(_HOOKS)):
                url = decode[way].url
                clients = [
                    EngineClient(http, prefill.url, url, port, source, {"routed_dp_rank": rank})
                    for rank in range(_RANKS)
                ]
                prompt, output = _REMOTE
                with _stopped(other for name, other in decode.items() if name != way):
                    replies = await asyncio.gather(
                        *(
                            client.remote(source.choices(vocabulary, k=prompt), output)
                            for client in clients
                            for _ in range(_DECODES // _RANKS)
                        )
                    )
                begun_s = max(reply.arrived_s[0] for reply in replies)
                ended_s = min(reply.arrived_s[-1] for reply in replies)
                if number >= 0:
                    rows.append(Hooks(number, way, _tpot(replies, begun_s, ended_s)))
            _report("hooks", number, rounds)
    return rows


@contextmanager
def _stopped(servers: Iterable[Process]) -> Iterator[None]:
    """Stop servers, because ranks that have nothing to do still exchange that."""
    groups = [server.popen.pid for server in servers]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


# -- what ranks of a prefill server find -------------------------------------------------------


def _prefill(launch: Launcher, model: str, rounds: int) -> Iterator[Prefill]:
    prefill = _start(launch, model, Role.PREFILL, "ranks-prefill")
    decode = launch.worker(Role.DECODE, model, *_KV, *_ONE_THREAD)
    wait_all([prefill, decode])
    yield from asyncio.run(_measure_prefill(prefill, decode, rounds))


async def _measure_prefill(prefill: Process, decode: Process, rounds: int) -> list[Prefill]:
    source, rows = random.Random(0), []
    async with _session() as http:
        vocabulary = await vocabulary_of(http, prefill.url)
        port = await bootstrap_port_of(http, prefill.url)
        client = EngineClient(http, prefill.url, decode.url, port, source)
        for number in range(rounds):
            for way in source.sample(_ROOMS, len(_ROOMS)):
                await empty_caches(http, [prefill.url, decode.url])
                found = await asyncio.gather(
                    *(
                        _conversation(client, vocabulary, index if way == _ROOMS[1] else None)
                        for index in range(_CONVERSATIONS)
                    )
                )
                prefix, cached = (sum(values) for values in zip(*found, strict=True))
                rows.append(Prefill(number, way, prefix, cached))
            _report("prefill", number, rounds)
    return rows


async def _conversation(
    client: EngineClient, vocabulary: range, rank: int | None
) -> tuple[int, int]:
    """Hold a conversation of remote turns.

    Args:
        rank: of all its rooms, modulo the number of ranks; None: any.

    Returns:
        Tokens that an earlier turn has prefilled, and how many of these were found.
    """
    prompt: list[int] = []
    prefix = cached = 0
    for turn in range(_TURNS):
        earlier = len(prompt) - 2 if turn else 0  # the reply was not prefilled
        prompt = prompt + client.rooms.choices(vocabulary, k=_TURN_TOKENS)
        room = client.rooms.getrandbits(62)
        if rank is not None:
            room += (rank - room) % _RANKS
        reply = await client.remote(prompt, 2, room=room)
        prefix, cached = prefix + earlier, cached + min(earlier, reply.prefill_cached_tokens)
        prompt = prompt + reply.ids
    return prefix, cached


_PARTS: dict[str, Callable[[Launcher, str, int], Iterator[Peers | Hooks | Prefill]]] = {
    "peers": _peers,
    "hooks": _hooks,
    "prefill": _prefill,
}


def _report(part: str, number: int, rounds: int) -> None:
    print(f"  {part}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def summarize(rows: Sequence[Peers | Hooks | Prefill]) -> dict[str, Any]:
    """Return medians, and ratios by round, of the parts that were measured."""
    peers = [row for row in rows if isinstance(row, Peers)]
    hooks = {(row.round, row.way): row.tpot_ms for row in rows if isinstance(row, Hooks)}
    prefill = [row for row in rows if isinstance(row, Prefill)]
    ratios = [ms / hooks[n, "stock"] for (n, way), ms in hooks.items() if way == "plugin"]
    return {
        "peers": [
            {
                "context": context,
                "new": new,
                "way": way,
                "ratio": round(statistics.median(r.tpot_ms / r.quiet_tpot_ms for r in of), 3),
                "ttft_ms": round(statistics.median(r.ttft_ms for r in of), 1),
            }
            for context, new in _APPENDS
            for way in _WAYS
            if (of := [r for r in peers if (r.context, r.new, r.way) == (context, new, way)])
        ],
        "hooks_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "prefix_found": {
            way: round(sum(r.cached_tokens for r in own) / sum(r.prefix_tokens for r in own), 3)
            for way in _ROOMS
            if (own := [r for r in prefill if r.way == way])
        },
    }
