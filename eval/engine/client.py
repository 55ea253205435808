"""Turns sent to a prefill and a decode worker directly, without a router between.

For measurements of the engine. The caller chooses the route of a turn, and each token's arrival is
kept. Prompts are token ids on ``/generate``.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from ppd.contract import LocalTerms
from ppd.errors import WorkerError

from ..generate import EventStream, generate, greedy_body


@dataclass(slots=True)
class Reply:
    """One answer; times are ``time.perf_counter`` seconds, one for each event with tokens.

    ``tokens`` has the number of tokens that had come with each event. ``prefill_cached_tokens`` is
    the prefill worker's count.
    """

    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_ms(self) -> float:
        """The time to the first token."""
        return 1e3 * (self.arrived_s[0] - self.sent_s)

    def arrived(self, tokens: int) -> None:
        """One more event, now, with which so many tokens have come."""
        self.arrived_s.append(time.perf_counter())
        self.tokens.append(tokens)
        self._grown.set()

    async def reaches(self, events: int) -> None:
        """Wait for so many; for one waiter at a time."""
        while len(self.arrived_s) < events:
            self._grown.clear()
            await self._grown.wait()


@dataclass(slots=True)
class EngineClient:
    """Sends turns to one prefill and one decode worker.

    Args:
        bootstrap_port: of the prefill worker.
        rooms: bootstrap rooms come from it.
        fields: added to requests to the decode worker.
    """

    http: aiohttp.ClientSession
    prefill_url: str
    decode_url: str
    bootstrap_port: int
    rooms: random.Random
    fields: Mapping[str, Any] = field(default_factory=dict)

    async def remote(
        self, ids: list[int], output: int, *, whole: bool = False, room: int | None = None
    ) -> Reply:
        """Send a turn through the prefill worker.

        Args:
            whole: the decode worker takes all KV, also what it holds; else what it does not hold.
            room: the bootstrap room; None: any.

        Raises:
            WorkerError: a worker answered with an error.
        """
        body = greedy_body(ids, output) | {
            "bootstrap_host": urlsplit(self.prefill_url).hostname,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self.rooms.getrandbits(62) if room is None else room,
        }
        decode_body = {**body, **self.fields}
        if whole:  # a cache of its own, in which there is nothing
            decode_body |= {"extra_key": f"{self.rooms.getrandbits(62):x}"}
        prefill = asyncio.create_task(_prefill(self.http, self.prefill_url, body))
        try:
            reply = await _stream(self.http, self.decode_url, decode_body, Reply(0.0))
            reply.prefill_cached_tokens = await prefill
        finally:
            prefill.cancel()
        return reply

    async def local(self, ids: list[int], output: int, min_cached: int = 0) -> Reply:
        """An append-prefill on the decode worker.

        Raises:
            WorkerError: it refused, or failed.
        """
        return await _stream(self.http, self.decode_url, self._local_body(ids, output, min_cached))

    @asynccontextmanager
    async def decoding(
        self, prompts: list[list[int]], max_tokens: int
    ) -> AsyncIterator[list[Reply]]:
        """Let requests decode in the background while the context is open.

        All of them are past their first token when it opens. Their connections are closed when it
        ends.

        Args:
            max_tokens: tokens of each reply.

        Raises:
            WorkerError: one of them failed, or ended before the context did.
        """
        replies = [Reply(0.0) for _ in prompts]
        streams = [
            asyncio.create_task(
                _stream(self.http, self.decode_url, self._local_body(ids, max_tokens, 0), reply)
            )
            for ids, reply in zip(prompts, replies, strict=True)
        ]
        tasks: list[asyncio.Task[Any]] = [*streams]
        try:
            begun = [asyncio.create_task(reply.reaches(3)) for reply in replies]
            tasks += begun
            await _before_any_ends(streams, begun)
            yield replies
            await _before_any_ends(streams, [])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _local_body(self, ids: list[int], output: int, min_cached: int) -> dict[str, Any]:
        body = {**greedy_body(ids, output), **self.fields}
        body["sampling_params"]["custom_params"] = LocalTerms(min_cached).to_custom_params()
        return body


async def bootstrap_port_of(http: aiohttp.ClientSession, prefill_url: str) -> int:
    """Ask a prefill worker for its bootstrap port."""
    async with http.get(f"{prefill_url}/server_info") as answer:
        return int((await answer.json())["disaggregation_bootstrap_port"])


async def plugin_state_of(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the plugin's part of a worker's ``/server_info``."""
    async with http.get(f"{url}/server_info") as answer:
        state: dict[str, Any] = (await answer.json())["internal_states"][0]["ppd"]
    return state


def gaps_ms(reply: Reply, from_s: float, to_s: float) -> list[float]:
    """Return the times between a reply's tokens that overlap an interval."""
    pairs = zip(reply.arrived_s, reply.arrived_s[1:], strict=False)
    return [1e3 * (after - before) for before, after in pairs if after > from_s and before < to_s]


def tpot_ms(replies: Sequence[Reply], from_s: float, to_s: float) -> float:
    """Return the time of a token over all replies, in all gaps that overlap an interval.

    With speculation an event brings several tokens, so that gaps are longer than tokens. Each reply
    must have an event before the interval and one after it.
    """
    spent_ms = tokens = 0.0
    for reply in replies:
        first = bisect_right(reply.arrived_s, from_s) - 1
        last = bisect_left(reply.arrived_s, to_s)
        spent_ms += 1e3 * (reply.arrived_s[last] - reply.arrived_s[first])
        tokens += reply.tokens[last] - reply.tokens[first]
    return spent_ms / tokens


async def _before_any_ends(
    streams: list[asyncio.Task[Reply]], awaited: list[asyncio.Task[None]]
) -> None:
    """Wait for ``awaited``.

    Raises:
        WorkerError: a stream ended before that.
    """
    for task in awaited:
        await asyncio.wait([task, *streams], return_when=asyncio.FIRST_COMPLETED)
    for stream in streams:
        if stream.done():
            stream.result()  # raises what it raised
            raise WorkerError("a background request ended before the measurement did")


async def _prefill(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Send a prefill leg; return the tokens of its prompt that were cached."""
    stream = EventStream()
    await _generate(http, url, body, stream)
    return stream.answer().cached_tokens


async def _stream(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], reply: Reply | None = None
) -> Reply:
    reply = reply or Reply(0.0)
    stream = EventStream()
    stream.on_tokens = partial(_note, stream, reply)
    reply.sent_s = time.perf_counter()
    await _generate(http, url, body, stream)
    message = stream.error_message()
    if message is not None or not stream.last:
        raise WorkerError(f"{url}: {message or 'no answer'}")
    answer = stream.answer()
    ending = answer.finish_reason
    if ending and ending["type"] == "abort":
        raise WorkerError(f"{url}: {ending.get('message', 'aborted')}")
    reply.ids, reply.cached_tokens = answer.ids, answer.cached_tokens
    return reply


def _note(stream: EventStream, reply: Reply) -> None:
    reply.arrived(stream.tokens)


async def _generate(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], stream: EventStream
) -> None:
    await generate(http, url, orjson.dumps(body), stream)
    if stream.status != 200:
        raise WorkerError(f"{url} answered {stream.status}: {stream.refusal}")
