"""A client that sees all of an answer: its bytes, when they came, how they ended.

Raw, because it also hangs up in ways that HTTP clients do not offer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import httptools
import orjson

from ..dialects import error_in, split_events


class Leave(StrEnum):
    """How a client hangs up."""

    HALF = "half"  # says that it is done, and reads on: what was under way to it, it sees
    AT_ONCE = "at_once"


@dataclass(frozen=True, slots=True)
class Patience:
    """When a client hangs up.

    Attributes:
        events: when so many have come.
        after_s: so long after it has asked.
    """

    how: Leave
    events: int | None = None
    after_s: float | None = None


@dataclass(slots=True)
class Reply:
    """Attributes:
    whole: the answer has come to its end, as HTTP counts.
    broken: how the connection ended in its midst; "" if it did not.
    left: the client has hung up.
    sent_s, first_s, ended_s: by ``time.monotonic``; ``first_s``: of the first body byte.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    broken: str = ""
    left: bool = False
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Infinite if nothing came."""
        return float("inf") if self.first_s is None else self.first_s - self.sent_s

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def values(self) -> list[Any]:
        """The JSON of each event but ``[DONE]``, or of the whole body; [] if it is none."""
        parts = split_events(self.body) if self.streams else [self.body]
        try:
            return [orjson.loads(part) for part in parts if part != b"[DONE]"]
        except orjson.JSONDecodeError:
            return []

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        found = (error_in(value) for value in self.values)
        return [error for error in found if error is not None]

    @property
    def dones(self) -> int:
        return split_events(self.body).count(b"[DONE]")


def http_request(path: str, body: bytes, *, method: str = "POST", more: str = "") -> bytes:
    """
    Args:
        more: header lines.
    """
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: eval\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body


class ReplyConnection(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._alive = False
        self._answer: asyncio.Future[None] | None = None
        self._reply = Reply()
        self._patience: Patience | None = None
        self._parts: list[bytes] = []
        self._events = 0
        self._end = b""

    @property
    def usable(self) -> bool:
        return self._alive and not self._transport.is_closing()

    async def ask(
        self, request: bytes, *, deadline_s: float, patience: Patience | None = None
    ) -> Reply:
        """What became of ``request``; after the deadline the client hangs up."""
        reply = self._reply = Reply(sent_s=time.monotonic())
        self._answer = self._loop.create_future()
        self._patience = patience
        self._parts, self._events, self._end = [], 0, b""
        timers = [self._loop.call_later(deadline_s, self._late)]
        if patience is not None and patience.after_s is not None:
            timers.append(self._loop.call_later(patience.after_s, self._leave))
        if self.usable:
            self._transport.write(request)
        else:
            self._lost("the connection was closed before")
        try:
            await self._answer
        finally:
            for timer in timers:
                timer.cancel()
        reply.body = b"".join(self._parts)
        reply.ended_s = time.monotonic()
        return reply

    def send(self, data: bytes) -> None:
        """What is no request, or half of one."""
        self._transport.write(data)

    def finish(self) -> None:
        """Close when all has been sent."""
        self._transport.close()

    def close(self) -> None:
        self._transport.abort()

    def _leave(self) -> None:
        patience = self._patience
        if patience is None or self._reply.left or self._answer is None or self._answer.done():
            return
        self._reply.left = True
        if patience.how is Leave.HALF and self.usable:
            self._transport.write_eof()
        else:
            self._lost("")
            self._transport.abort()

    def _late(self) -> None:
        self._lost("no end in time")
        self._transport.abort()

    def _lost(self, how: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._reply.broken = how
            self._answer.set_result(None)

    # -- the transport and the parser ---------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._alive = False
        self._lost(f"reset: {exc}" if exc else "closed")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(f"no HTTP: {error}")
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._reply.first_s is None:
            self._reply.first_s = time.monotonic()
        self._parts.append(data)
        patience = self._patience
        if patience is not None and patience.events is not None:
            self._events += (self._end + data).count(b"\n\n")
            self._end = data[-1:] if not data.endswith(b"\n\n") else b""
            if self._events >= patience.events:
                self._leave()

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._reply.whole = True
            self._answer.set_result(None)


async def connect(port: int) -> ReplyConnection:
    """Raises: OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(ReplyConnection, "127.0.0.1", port)
    return connection
