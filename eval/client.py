"""The load generator: whole conversations, open loop, against one URL.

Conversations arrive when their plan says, however slow the server is; inside a conversation
a turn follows the reply before it after its think time. Prompts are token ids of exact length
on ``/generate``; each turn sends the whole history, as chat clients do. No connection cap.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp
import orjson


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn to be held: ``think_s`` passes before it, from the end of the reply before."""

    new_tokens: int
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    starts_at_s: float
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one turn showed.

    Attributes:
        conversation, turn: which one; turns count from 1.
        sent_at_s: since the start of the run; ``late_ms`` after it was due.
        context_tokens: of all earlier turns, prompts and replies.
        output_tokens: asked for and, unless ``error`` says otherwise, received.
        cached_tokens: of the prompt, as the engine reports them.
        route, reason: as the router's headers say.
        ttft_ms: from the send to the first event.
        tpot_ms: from the first to the last event, for each token after the first.
        error: why the turn failed; its conversation ends there.
    """

    conversation: int
    turn: int
    sent_at_s: float
    late_ms: float
    context_tokens: int
    new_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    route: str = ""
    reason: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    error: str = ""


async def hold(
    url: str,
    conversations: Sequence[Conversation],
    *,
    seed: str,
    vocabulary: range,
    timeout_s: float = 120.0,
    headers: dict[str, str] | None = None,
) -> list[Sample]:
    """Hold all ``conversations``; a row for each turn that was sent.

    Args:
        seed: of the prompts' content. Not one that the same router has seen: it would take them
            for conversations it knows.
        vocabulary: token ids to make prompts of.
        timeout_s: of a turn without any event.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as http:
        start_s = time.perf_counter()
        held = await asyncio.gather(
            *(
                _hold_one(_Server(http, url), number, one, start_s, seed, vocabulary)
                for number, one in enumerate(conversations)
            )
        )
    return [sample for samples in held for sample in samples]


@dataclass(frozen=True, slots=True)
class _Server:
    http: aiohttp.ClientSession
    url: str


async def _hold_one(
    server: _Server,
    number: int,
    conversation: Conversation,
    start_s: float,
    seed: str,
    vocabulary: range,
) -> list[Sample]:
    source = random.Random(f"{seed}/{number}")
    samples: list[Sample] = []
    history: list[int] = []
    due_s = start_s + conversation.starts_at_s
    for turn, exchange in enumerate(conversation.exchanges, 1):
        new = source.choices(vocabulary, k=exchange.new_tokens)
        due_s += exchange.think_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        sent_s = time.perf_counter()
        sample = Sample(
            conversation=number,
            turn=turn,
            sent_at_s=round(sent_s - start_s, 4),
            late_ms=round(1e3 * (sent_s - due_s), 2),
            context_tokens=len(history),
            new_tokens=exchange.new_tokens,
            output_tokens=exchange.output_tokens,
        )
        history += new
        samples.append(await _send(server, history, sample))
        if samples[-1].error:
            break
        due_s = time.perf_counter()
    return samples


async def _send(server: _Server, history: list[int], sample: Sample) -> Sample:
    """Send one turn; its reply is added to ``history``."""
    body = {
        "input_ids": history,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": sample.output_tokens,
            "ignore_eos": True,
        },
    }
    first_s = last_s = 0.0
    last = b""
    started_s = time.perf_counter()
    try:
        async with server.http.post(f"{server.url}/generate", data=orjson.dumps(body)) as response:
            if response.status != 200:
                return replace(sample, error=f"{response.status} {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                last, last_s = line, time.perf_counter()
                first_s = first_s or last_s
            route = response.headers.get("X-PPD-Route", "")
            reason = response.headers.get("X-PPD-Reason", "")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return replace(sample, error=str(error) or type(error).__name__)
    answer = orjson.loads(last[6:]) if last else {}
    ids = answer.get("output_ids") or []
    if "error" in answer or len(ids) != sample.output_tokens:
        return replace(
            sample, error=f"got {len(ids)} tokens: {answer.get('error', 'no error told')}"
        )
    history += ids
    return replace(
        sample,
        route=route,
        reason=reason,
        cached_tokens=answer["meta_info"]["cached_tokens"],
        ttft_ms=round(1e3 * (first_s - started_s), 3),
        tpot_ms=round(1e3 * (last_s - first_s) / max(1, len(ids) - 1), 3),
    )


async def vocabulary_of(http: aiohttp.ClientSession, decode_url: str) -> range:
    """Token ids for prompts, as a decode worker with the plugin tells; without the special
    tokens, which stand first or are few."""
    async with http.get(f"{decode_url}/server_info") as answer:
        size: int = (await answer.json())["internal_states"][0]["ppd"]["vocab_size"]
    return range(size // 16, size)


async def empty_caches(http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    """Empty the workers' radix caches, which a server does only when it is idle: waits for it."""
    for url in urls:
        while True:
            async with http.post(f"{url}/flush_cache") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.05)
