"""One connection to a worker: it serves one exchange at a time, and is kept if nothing speaks
against it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

_HEAD_BYTES = 64 * 1024


class Taker(Protocol):
    """Who is served. After ``ended`` or ``failed`` nothing more comes."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def ended(self, reusable: bool) -> None: ...

    def failed(self, error: Exception) -> None: ...


_NO_PARSER = httptools.HttpResponseParser(object())


class Upstream(asyncio.Protocol):
    """One connection to a worker; serves one exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.heard_s = loop.time()
        self._loop = loop
        self._transport: asyncio.Transport
        self._exchange: Taker | None = None
        self._alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = True
        self._parts: list[bytes] = []
        self._until_close = False
        self._complete = False
        self._keeps_alive = False
        self._unasked = False  # something came behind the answer

    @property
    def usable(self) -> bool:
        return self._alive and not self._transport.is_closing()

    def serve(self, exchange: Taker, data: bytes) -> None:
        self._exchange = exchange
        self._headers = {}
        self._head_bytes = 0
        self._in_head = True
        self._until_close = self._complete = False
        self.heard_s = self._loop.time()
        self._transport.write(data)

    def hold(self, held: bool) -> None:
        if self._alive and held:
            self._transport.pause_reading()
        elif self._alive:
            self.heard_s = self._loop.time()
            self._transport.resume_reading()

    def close(self) -> None:
        self._exchange = None
        if self._alive:
            self._transport.abort()

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._alive = False
        self._parser = _NO_PARSER  # which holds us: no cycle shall be left
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and self._until_close:
            exchange.ended(False)
        else:
            exchange.failed(ConnectionError(str(exc or "the connection was closed")))

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # a worker that speaks unasked is not understood
            self._transport.abort()
            return
        self.heard_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken(exchange, f"not understood: {error}")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._broken(exchange, f"a head of more than {_HEAD_BYTES} bytes")
                return
        if parts := self._parts:
            self._parts = []
            exchange.body(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._complete and self._exchange is not None:  # it may have been closed meanwhile
            self._exchange = None
            reusable = self._keeps_alive and not self._unasked
            if not reusable:
                self._transport.close()
            exchange.ended(reusable)

    def _broken(self, exchange: Taker, how: str) -> None:
        self._exchange = None
        self._transport.abort()
        exchange.failed(ConnectionError(how))

    # -- the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._unasked = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode(errors="surrogateescape")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._unasked:
            return
        self._in_head = False
        headers = self._headers
        self._until_close = "content-length" not in headers and "transfer-encoding" not in headers
        if self._exchange is not None:
            self._exchange.head(status, headers)

    def on_body(self, data: bytes) -> None:
        if not self._unasked:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._unasked:
            pass
        elif self._in_head:  # of "100 Continue", which no one has asked for
            self._headers = {}
        else:
            self._complete = True
            # Not later: llhttp has forgotten it then. And after an error uvicorn closes, whatever
            # it says, which the next request would find out.
            kept = self._parser.should_keep_alive()
            self._keeps_alive = kept and self._parser.get_status_code() < 500
