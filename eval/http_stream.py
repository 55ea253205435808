"""A raw HTTP client of streams: when an answer's bytes come, and how its connection ends.

It works on asyncio's protocols. So it costs less than what the benches measure with it, and it
closes connections in ways that HTTP clients do not offer.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import httptools
import orjson

from .dialects import error_in, split_events

_TAIL_BYTES = 14  # of b"data: [DONE]\n\n"


class HangUp(StrEnum):
    """How a client closes its connection."""

    HALF = "half"  # it sends the end of its stream, and goes on reading
    AT_ONCE = "at_once"


@dataclass(frozen=True, slots=True)
class Patience:
    """When a client closes its connection.

    Attributes:
        how: how it closes it.
        events: after so many events.
        after_s: so long after its request.
    """

    how: HangUp
    events: int | None = None
    after_s: float | None = None


@dataclass(slots=True)
class Reply:
    """An answer, as a client received it.

    Attributes:
        body: all of it; of a counting connection, its end.
        whole: the answer has come to its end, as HTTP counts.
        broken: how the connection ended before that; "" if it did not.
        left: the client has closed its connection.
        sent_s, first_s, ended_s: by ``time.monotonic``; ``first_s``: of the first body byte.
        chunks: occurrences of the connection's marker.
        stamps: when each of them was read, if the connection keeps that.
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
    chunks: int = 0
    stamps: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """The time to the first body byte; infinite if none came."""
        return float("inf") if self.first_s is None else self.first_s - self.sent_s

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
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
        """The error objects in the answer, in order."""
        found = (error_in(value) for value in self.values)
        return [error for error in found if error is not None]

    @property
    def dones(self) -> int:
        """How many ``[DONE]`` events the answer has."""
        return split_events(self.body).count(b"[DONE]")

    def problem(self) -> str | None:
        """Return why the answer is no complete 200, or None."""
        if not self.whole:
            return self.broken
        if self.status != 200:
            return f"status {self.status}: {self.body[:200]!r}"
        if self.streams and not self.body.endswith(b"data: [DONE]\n\n"):
            return "no [DONE]"
        return None


@dataclass(slots=True)
class Tally:
    """Counts what all connections of a run have received together.

    Attributes:
        answers: answers that have begun.
        chunks: occurrences of the connections' marker.
        reads: from the sockets.
    """

    answers: int = 0
    chunks: int = 0
    reads: int = 0
    _goal: tuple[int, int] = (0, 0)
    _reached: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answers: int, chunks: int) -> None:
        """Count what a connection has received."""
        self.answers += answers
        self.chunks += chunks
        if self.answers >= self._goal[0] and self.chunks >= self._goal[1]:
            self._reached.set()

    async def reached(self, answers: int, chunks: int, ended: asyncio.Future[Any]) -> None:
        """Wait until so many have come in all, or ``ended`` is done."""
        self._goal = (answers, chunks)
        self._reached.clear()
        self.add(0, 0)
        ended.add_done_callback(lambda _: self._reached.set())
        await self._reached.wait()


def http_request(path: str, body: bytes, *, method: str = "POST", headers: str = "") -> bytes:
    """Return the bytes of a request with a JSON body.

    Args:
        headers: more header lines, each with its line end.
    """
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: eval\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


class StreamConnection(asyncio.Protocol):
    """One connection, with one request after the other.

    Args:
        tally: counts what comes.
        marker: bytes to count in bodies. With one, only the end of each body is kept.

    Attributes:
        acknowledges_at_once: send an ACK for each packet; the kernel would wait for more.
        keeps_stamps: keep the time of each chunk.
    """

    def __init__(self, tally: Tally | None = None, marker: bytes = b"") -> None:
        self.acknowledges_at_once = False
        self.keeps_stamps = False
        self._tally = tally or Tally()
        self._marker = marker
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._alive = False
        self._answer: asyncio.Future[None] | None = None
        self._reply = Reply()
        self._patience: Patience | None = None
        self._parts: list[bytes] = []
        self._events = 0
        self._cut = b""  # the end of a part: a marker or an event's end may be split

    @property
    def usable(self) -> bool:
        """Whether a request can be sent."""
        return self._alive and not self._transport.is_closing()

    async def ask(
        self, request: bytes, *, deadline_s: float = 120.0, patience: Patience | None = None
    ) -> Reply:
        """Send a request, and wait for the end of its answer or connection.

        Args:
            deadline_s: after so long the connection is closed.
            patience: when to close it before.
        """
        reply = self._reply = Reply(sent_s=time.monotonic())
        self._answer = self._loop.create_future()
        self._patience = patience
        self._parts, self._events, self._cut = [], 0, b""
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
        """Send bytes that are no whole request."""
        self._transport.write(data)

    def finish(self) -> None:
        """Close the connection when all has been sent."""
        self._transport.close()

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _leave(self) -> None:
        patience = self._patience
        if patience is None or self._reply.left or self._answer is None or self._answer.done():
            return
        self._reply.left = True
        if patience.how is HangUp.HALF and self.usable:
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
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer that is under way, if there is one."""
        self._alive = False
        self._lost(f"reset: {exc}" if exc else "closed")

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._tally.reads += 1
        if self.acknowledges_at_once:  # the kernel resets the option after some packets
            link = self._transport.get_extra_info("socket")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(f"no HTTP: {error}")
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Keep the status."""
        self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Count or keep a part of the body; close the connection if it is time."""
        begins = self._reply.first_s is None
        if begins:
            self._reply.first_s = time.monotonic()
        if self._marker:
            chunks = (self._cut + data).count(self._marker)
            self._cut = data[1 - len(self._marker) :]
            self._reply.chunks += chunks
            self._tally.add(begins, chunks)
            if self.keeps_stamps:
                self._reply.stamps += [time.monotonic()] * chunks
            self._parts = [data if len(data) >= _TAIL_BYTES else b"".join(self._parts) + data]
            return
        self._parts.append(data)
        patience = self._patience
        if patience is not None and patience.events is not None:
            self._events += (self._cut + data).count(b"\n\n")
            self._cut = data[-1:] if not data.endswith(b"\n\n") else b""
            if self._events >= patience.events:
                self._leave()

    def on_message_complete(self) -> None:
        """End the answer."""
        if self._answer is not None and not self._answer.done():
            self._reply.whole = True
            self._answer.set_result(None)


async def connect(port: int) -> StreamConnection:
    """Open one connection to a port of this machine.

    Raises:
        OSError: nothing listens there.
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(StreamConnection, "127.0.0.1", port)
    return connection


async def connect_many(
    port: int, count: int, tally: Tally, marker: bytes
) -> list[StreamConnection]:
    """Open ``count`` connections that count ``marker``.

    Raises:
        OSError: nothing listens there.
    """
    loop = asyncio.get_running_loop()
    made: list[StreamConnection] = []
    while len(made) < count:
        wave = (
            loop.create_connection(lambda: StreamConnection(tally, marker), "127.0.0.1", port)
            for _ in range(min(256, count - len(made)))
        )
        made += [connection for _, connection in await asyncio.gather(*wave)]
    return made
