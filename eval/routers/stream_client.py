"""A client of many streams on raw protocols, that costs less than what it measures."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

KEY = "sk-bench"  # of one router's tenant; the others do not ask

_EVENT = b'"content":" token"'
_WAIT_S = 120.0  # for one answer


@dataclass(slots=True)
class Received:
    """Attributes:
    ttft_s: from the request's sending to the first body byte.
    problem: why it is no good answer, or None.
    """

    ttft_s: float = 0.0
    chunks: int = 0
    problem: str | None = None


def chat_request(model: str, content: str, max_tokens: int, *, stream: bool) -> bytes:
    """A whole HTTP request."""
    body = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 20},
            {"role": "user", "content": content},
        ],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass(slots=True)
class Tally:
    """What all connections together have received."""

    answers: int = 0  # begun
    chunks: int = 0
    _goal: tuple[int, int] = (0, 0)
    _there: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answers: int, chunks: int) -> None:
        self.answers += answers
        self.chunks += chunks
        if self.answers >= self._goal[0] and self.chunks >= self._goal[1]:
            self._there.set()

    async def reached(self, answers: int, chunks: int, ended: asyncio.Future[Any]) -> None:
        """Wait until so many have come in all, or nothing more will."""
        self._goal = (answers, chunks)
        self._there.clear()
        self.add(0, 0)
        ended.add_done_callback(lambda _: self._there.set())
        await self._there.wait()


class StreamConnection(asyncio.Protocol):
    """One connection, one request after the other.

    Attributes:
        acknowledges_at_once: what comes; the kernel would wait for more of it.
    """

    def __init__(self, tally: Tally) -> None:
        self.acknowledges_at_once = False
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Received] | None = None
        self._received = Received()
        self._sent_s = 0.0
        self._events = 0
        self._last = self._cut = b""
        self._stream = False

    async def ask(self, request: bytes, *, stream: bool) -> Received:
        self._answer = self._loop.create_future()
        self._received = Received()
        self._events, self._stream = 0, stream
        self._last = self._cut = b""
        self._sent_s = time.perf_counter()
        if self._transport.is_closing():
            return Received(problem="the connection was closed")
        self._transport.write(request)
        try:
            return await asyncio.wait_for(self._answer, _WAIT_S)
        except TimeoutError:
            self._transport.abort()
            return Received(problem="no answer in time")

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was lost: {exc!r}")

    def data_received(self, data: bytes) -> None:
        if self.acknowledges_at_once:  # the kernel forgets it after some packets
            link = self._transport.get_extra_info("socket")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"no HTTP: {error}")

    def on_body(self, data: bytes) -> None:
        begins = not self._received.ttft_s
        if begins:
            self._received.ttft_s = time.perf_counter() - self._sent_s
        events = (self._cut + data).count(_EVENT)
        self._cut = data[1 - len(_EVENT) :]
        self._events += events
        self._tally.add(begins, events)
        self._last = data if len(data) >= 14 else self._last + data

    def on_message_complete(self) -> None:
        self._received.chunks = self._events
        status = self._parser.get_status_code()
        if status != 200:
            self._finish(f"status {status}: {self._last[:200]!r}")
        elif self._stream and not self._last.endswith(b"data: [DONE]\n\n"):
            self._finish("no [DONE]")
        else:
            self._finish(None)

    def _finish(self, problem: str | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._received.problem = problem
            self._answer.set_result(self._received)


async def connect(port: int, count: int, tally: Tally) -> list[StreamConnection]:
    loop = asyncio.get_running_loop()
    made: list[StreamConnection] = []
    while len(made) < count:
        wave = (
            loop.create_connection(lambda: StreamConnection(tally), "127.0.0.1", port)
            for _ in range(min(256, count - len(made)))
        )
        made += [connection for _, connection in await asyncio.gather(*wave)]
    return made
