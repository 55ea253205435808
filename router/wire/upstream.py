"""One connection to a worker, which serves one exchange at a time and may be reused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

_HEAD_BYTES = 64 * 1024


class ExchangeListener(Protocol):
    """The callbacks of a connection for one exchange. ``ended`` or ``failed`` is the last one."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers, which have lower-case names."""
        ...

    def body(self, data: bytes) -> None:
        """Receive a part of the body."""
        ...

    def ended(self, reusable: bool) -> None:
        """Receive the end of a complete response.

        Args:
            reusable: the connection can serve another exchange.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Receive the failure of the connection or of the response's parser."""
        ...


_NO_PARSER = httptools.HttpResponseParser(object())


class Upstream(asyncio.Protocol):
    """One connection to a worker, which serves one exchange at a time.

    Attributes:
        last_received_s: when data last arrived, or when the exchange began; by the loop's clock.
    """

    __slots__ = (
        "_alive",
        "_complete",
        "_exchange",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_keeps_alive",
        "_loop",
        "_parser",
        "_parts",
        "_transport",
        "_unexpected",
        "_until_close",
        "last_received_s",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.last_received_s = loop.time()
        self._loop = loop
        self._transport: asyncio.Transport
        self._exchange: ExchangeListener | None = None
        self._alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = True
        self._parts: list[bytes] = []
        self._until_close = False
        self._complete = False
        self._keeps_alive = False
        self._unexpected = False  # data arrived after the response

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self._alive and not self._transport.is_closing()

    def serve(self, exchange: ExchangeListener, data: bytes) -> None:
        """Send the request ``data``; the response goes to ``exchange``."""
        self._exchange = exchange
        self._headers = {}
        self._head_bytes = 0
        self._in_head = True
        self._until_close = self._complete = False
        self.last_received_s = self._loop.time()
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        if self._alive:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again; the pause does not count as an idle time."""
        if self._alive:
            self.last_received_s = self._loop.time()
            self._transport.resume_reading()

    def close(self) -> None:
        """Abort the connection; the exchange gets no further callback."""
        self._exchange = None
        if self._alive:
            self._transport.abort()

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport (called by asyncio)."""
        self._transport = cast(asyncio.Transport, transport)
        self._alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange (called by asyncio)."""
        self._alive = False
        self._parser = _NO_PARSER  # it refers back to this object: breaks the cycle
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and self._until_close:
            exchange.ended(False)
        else:
            exchange.failed(ConnectionError(str(exc or "the connection was closed")))

    def data_received(self, data: bytes) -> None:
        """Parse received data and pass it to the exchange (called by asyncio)."""
        exchange = self._exchange
        if exchange is None:  # data without a request has no meaning
            self._transport.abort()
            return
        self.last_received_s = self._loop.time()
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
        if self._complete and self._exchange is not None:  # a callback may have closed it
            self._exchange = None
            reusable = self._keeps_alive and not self._unexpected
            if not reusable:
                self._transport.close()
            exchange.ended(reusable)

    def _broken(self, exchange: ExchangeListener, message: str) -> None:
        self._exchange = None
        self._transport.abort()
        exchange.failed(ConnectionError(message))

    # -- the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note a second message (called by the parser)."""
        self._unexpected = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header under its lower-case name (called by the parser)."""
        self._headers[name.decode("latin-1").lower()] = value.decode(errors="surrogateescape")

    def on_headers_complete(self) -> None:
        """Pass the head to the exchange (called by the parser)."""
        status = self._parser.get_status_code()
        if status < 200 or self._unexpected:
            return
        self._in_head = False
        headers = self._headers
        self._until_close = "content-length" not in headers and "transfer-encoding" not in headers
        if self._exchange is not None:
            self._exchange.head(status, headers)

    def on_body(self, data: bytes) -> None:
        """Store a part of the body (called by the parser)."""
        if not self._unexpected:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Note whether the connection can be reused (called by the parser)."""
        if self._unexpected:
            pass
        elif self._in_head:  # "100 Continue", which no request asks for
            self._headers = {}
        else:
            self._complete = True
            # llhttp resets this flag afterwards. After an error uvicorn closes the connection,
            # even if its response has "keep-alive"; the next request would fail.
            kept = self._parser.should_keep_alive()
            self._keeps_alive = kept and self._parser.get_status_code() < 500
