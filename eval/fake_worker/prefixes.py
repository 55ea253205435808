"""Fake workers with a prefix cache and a queue: a prompt takes its time, less what is cached.

A prefill worker computes one prompt after another. A decode worker answers when the KV has come,
in the same process. Both keep the blocks of their prompts, least recently used first out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import xxhash

from ppd.contract import LOCAL_MARKER, Role

from ..dialects import Counts, stream_events
from .request import Request
from .worker import FakeWorker

_BLOCK_BYTES = 256
_BYTES_PER_TOKEN = 4
_MAX_KEPT_ROOMS = 10_000


class PrefixCache:
    """The blocks of prompts that a worker holds.

    Args:
        capacity_tokens: beyond it the least recently used blocks are evicted.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = max(1, capacity_tokens * _BYTES_PER_TOKEN // _BLOCK_BYTES)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def take(self, text: bytes) -> int:
        """Hold a prompt; return how many of its tokens were held before."""
        hasher = xxhash.xxh3_128()
        found, unbroken = 0, True
        for start in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            hasher.update(text[start : start + _BLOCK_BYTES])
            block = hasher.digest()
            unbroken = unbroken and block in self._blocks
            found += unbroken
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return found * _BLOCK_BYTES // _BYTES_PER_TOKEN


class Rooms:
    """Transfers by bootstrap room: the prefill worker's cached tokens, when its KV is there."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, asyncio.Future[int]] = OrderedDict()

    def of(self, room: int) -> asyncio.Future[int]:
        """The transfer of a room."""
        if room not in self._rooms:
            self._rooms[room] = asyncio.get_running_loop().create_future()
            if len(self._rooms) > _MAX_KEPT_ROOMS:
                self._rooms.popitem(last=False)
        return self._rooms[room]


class PrefixScript:
    """Answers chat streams of one worker.

    Args:
        rooms: of all workers of the cluster.
        ms_per_token: time to prefill a token.
        step_ms: time of a decode step.
        capacity_tokens: of the KV cache.

    Attributes:
        computed_tokens: by prefills so far.
        requests: so far.
    """

    def __init__(
        self, rooms: Rooms, ms_per_token: float, step_ms: float, capacity_tokens: int
    ) -> None:
        self._rooms = rooms
        self._s_per_token = ms_per_token / 1e3
        self._step_s = step_ms / 1e3
        self._cache = PrefixCache(capacity_tokens)
        self._engine = asyncio.Lock()  # one prompt at a time
        self.computed_tokens = 0
        self.requests = 0

    async def __call__(self, request: Request) -> None:
        """Answer one request."""
        body, worker = request.body, request.worker
        self.requests += 1
        text = b"".join(f"{m['role']}:{m['content']}".encode() for m in body["messages"])
        tokens = len(text) // _BYTES_PER_TOKEN
        local = LOCAL_MARKER.encode() in request.leg.body
        if worker.role == Role.PREFILL or local:
            cached = await self._prefill(text, tokens)
        if worker.role == Role.PREFILL:
            transfer = self._rooms.of(body["bootstrap_room"])
            transfer.set_result(cached)
        elif not local:
            cached = await self._rooms.of(body["bootstrap_room"])
            self._cache.take(text)
        words = int(body.get("max_tokens", 1)) if worker.role == Role.DECODE else 1
        await self._stream(request, tokens, words, min(cached, tokens - 1))

    async def _prefill(self, text: bytes, tokens: int) -> int:
        async with self._engine:
            cached = self._cache.take(text)
            left = max(1, tokens - cached)
            self.computed_tokens += left
            await asyncio.sleep(left * self._s_per_token)
        return cached

    async def _stream(self, request: Request, tokens: int, words: int, cached: int) -> None:
        worker, held = request.worker, tokens + words
        _hold(worker, held)
        try:
            counts = Counts(tokens, words, cached)
            for event in stream_events(request.path, self.requests, counts, worker.port):
                request.send(event)
                await asyncio.sleep(self._step_s)
        finally:
            _hold(worker, -held)


def _hold(worker: FakeWorker, tokens: int) -> None:
    """Count tokens as used in what the worker reports of its load."""
    if worker.free_tokens is not None:
        worker.free_tokens -= tokens
        worker.running += 1 if tokens > 0 else -1
        worker.load_written_at += 1.0


def prefix_worker(role: Role, rooms: Rooms, **options: Any) -> FakeWorker:
    """Return a worker with a prefix cache; the options are those of :class:`PrefixScript`."""
    free = options["capacity_tokens"] if role is Role.DECODE else None
    return FakeWorker(role.value, PrefixScript(rooms, **options), free_tokens=free)
