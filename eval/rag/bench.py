"""``ppd-eval rag bench``: what retrieval costs later turns, by where its passages go.

Ten turns of a chat about the project's own docs, four ways side by side on the same workers:
without retrieval; passages at the tail, as the router places and keeps them; passages in the last
user message, from which later requests leave them out; and passages in the system prompt, anew for
each turn. In the last two ways the client searches, in the same pool.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .. import tiny_model
from ..chat import Message, ask, connected
from ..cluster import launching
from ..endpoints import empty_caches
from ..provenance import provenance
from ..raw_rows import append_whole
from ..real_model import ServedModel
from .cluster import COLLECTION, Passage, RagCluster, build_collection, passages, start

WAYS = ("off", "tail", "stripped", "system")
_TURNS = 10
_K = 2
_REPLY_TOKENS = 24


@dataclass(frozen=True, slots=True)
class RagTurn:
    """One measured turn.

    Attributes:
        context_tokens: of all earlier turns, prompts and replies.
    """

    round: int
    way: str
    turn: int
    route: str
    context_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float


def run(
    model: str | None, docs: Path, cache: Path, rounds: int, out: Path | None, logs: Path
) -> int:
    """Measure all ways; the last line on stdout is one JSON object.

    Raises:
        ConfigError: there are no docs, or the sentence model cannot be fetched.
        WorkerError: a turn failed.
    """
    path = tiny_model.resolve(model)
    found = passages(docs)
    data = logs / "rag"
    build_collection(found, data, cache)
    with launching(logs) as launch:
        cluster = start(launch, ServedModel(path, path), data, cache, "full")
        turns = asyncio.run(_measure(cluster, found, rounds))
    if out is not None:
        origin = {"part": "rag", "model": Path(path).name, **provenance(0)}
        append_whole(out, [{**origin, **asdict(turn)} for turn in turns])
    print(json.dumps({"turns": list(summarize(turns))}))
    return 0


def summarize(turns: Sequence[RagTurn]) -> list[dict[str, Any]]:
    """Return medians over the rounds, a row for each turn."""
    rows = []
    for number in range(1, _TURNS + 1):
        row: dict[str, Any] = {"turn": number}
        for way in WAYS:
            some = [turn for turn in turns if (turn.way, turn.turn) == (way, number)]
            row[f"{way}_cached"] = round(statistics.median(one.cached_tokens for one in some))
            row[f"{way}_context"] = round(statistics.median(one.context_tokens for one in some))
            row[f"{way}_ttft_ms"] = round(statistics.median(one.ttft_ms for one in some), 1)
        rows.append(row)
    return rows


async def _measure(cluster: RagCluster, found: Sequence[Passage], rounds: int) -> list[RagTurn]:
    turns: list[RagTurn] = []
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        for number in range(-1, rounds):  # the first warms up, and is not counted
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                await empty_caches(http, cluster.workers)
                conversation = await _hold(http, cluster, found, way, number)
                turns += conversation if number >= 0 else []
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return turns


async def _hold(
    http: aiohttp.ClientSession,
    cluster: RagCluster,
    found: Sequence[Passage],
    way: str,
    number: int,
) -> list[RagTurn]:
    """One conversation. Its questions are beginnings of passages, so that there is something to
    find; those of a round are the same for all ways."""
    messages: list[Message] = []
    turns: list[RagTurn] = []
    context = 0
    async with connected(cluster.router.url) as client:
        for turn in range(1, _TURNS + 1):
            about = found[(number * _TURNS + turn * 7) % len(found)]
            question = f"({way} {number}) What about this: {about.text[:90]}"
            messages.append({"role": "user", "content": question})
            began_s = time.perf_counter()
            sent, extra = messages, dict[str, Any](ignore_eos=True)
            if way == "tail":
                extra["retrieval"] = {"collection": COLLECTION, "k": _K}
            elif way == "stripped":
                quoted = await _quoted_passages(http, cluster, question)
                sent = [*messages[:-1], {"role": "user", "content": f"{question}\n\n{quoted}"}]
            elif way == "system":
                quoted = await _quoted_passages(http, cluster, question)
                sent = [{"role": "system", "content": quoted}, *messages]
            reply = await ask(client, sent, _REPLY_TOKENS, **extra)
            # With the search, the router's or the client's.
            ttft_ms = 1e3 * (reply.first_s - began_s)
            cached, prompt_tokens = reply.cached_tokens, reply.prompt_tokens
            turns.append(
                RagTurn(number, way, turn, reply.route, context, prompt_tokens, cached, ttft_ms)
            )
            context = reply.prompt_tokens + reply.completion_tokens
            messages.append({"role": "assistant", "content": reply.text})
    return turns


async def _quoted_passages(http: aiohttp.ClientSession, cluster: RagCluster, question: str) -> str:
    url = f"{cluster.pool.url}/v1/collections/{COLLECTION}/search"
    async with http.post(url, json={"text": question, "limit": _K}) as answer:
        hits = (await answer.json())["results"][0]["hits"]
    quoted = [f"[{number}] {hit['text']}" for number, hit in enumerate(hits, 1)]
    return "\n\n".join(("Passages that may help:", *quoted))
