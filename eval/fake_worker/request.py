"""One generation request to a fake worker, and the writing of its answer."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from .connection import STREAM, STREAM_END, STREAM_HEAD, chunked, whole_answer

if TYPE_CHECKING:
    from .worker import FakeWorker

_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@dataclass(slots=True)
class Leg:
    """The record of one request to a worker; times are those of ``time.monotonic``.

    Attributes:
        headers: by lower-case name.
        given_up_s: when the router closed the connection, if that was before the answer's end.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    began_s: float
    given_up_s: float | None = None


class Request:
    """One request and its answer.

    Attributes:
        worker: the worker that received the request.
        leg: the record of the request.
        ended: whether the answer has ended, in good order or not.
    """

    def __init__(self, worker: FakeWorker, leg: Leg, transport: asyncio.Transport) -> None:
        self.worker = worker
        self.leg = leg
        self.ended = False
        self._streaming = False
        self._transport = transport

    @property
    def path(self) -> str:
        """The path of the request."""
        return self.leg.path

    @property
    def body(self) -> Any:
        """The JSON value of the body."""
        return orjson.loads(self.leg.body)

    @property
    def wants_stream(self) -> bool:
        """Whether the answer shall be a stream of events."""
        return STREAM.search(self.leg.body) is not None

    def start(self) -> None:
        """Write the head of a stream without an event."""
        self.send()

    def send(self, *events: bytes) -> None:
        """Write events, each as one chunk, behind the head of the stream."""
        head = b"" if self._streaming else STREAM_HEAD
        self._streaming = True
        self._write(head + b"".join(map(chunked, events)))

    def answer(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with one JSON value."""
        self.answer_bytes(orjson.dumps(value), status, headers)

    def answer_bytes(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a body of any bytes."""
        self._write(whole_answer(body, status, headers))
        self.ended = True

    def begin_whole(self) -> None:
        """Write the head and the first byte of an answer that does not stream."""
        self._write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")

    def end(self) -> None:
        """End the stream in good order, if it has not ended."""
        if not self.ended:
            self.send()
            self._write(STREAM_END)
            self.ended = True

    def close(self) -> None:
        """Close the connection when all has been written."""
        self.ended = True
        self._transport.close()

    def drop(self) -> None:
        """Close the connection at once."""
        self.ended = True
        self._transport.abort()

    def reset(self) -> None:
        """Reset the connection, as a network or a dying process does."""
        self.ended = True
        reset(self._transport)

    def _write(self, data: bytes) -> None:
        assert not self.ended, "the answer has ended"
        self._transport.write(data)


Script = Callable[[Request], Awaitable[None]]


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection, unless it is closing."""
    if transport.is_closing():
        return
    link = transport.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
