"""One connection of a client: its requests are served in order, with timeouts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

from .reading import Limits, RequestReader
from .request import STOPPING, Connection, Listener, Refusal, Request

logger = logging.getLogger("ppd.router.http")

_MAX_READY = 16  # requests of one connection that wait for the one in progress
_MAX_READY_BYTES = 1024 * 1024  # of the waiting bodies; the last one may exceed it
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Server(Protocol):
    """The part of ``WireServer`` that a connection uses."""

    paths: frozenset[str]
    handler: Callable[[Request], Awaitable[None]]
    fallback: Callable[[], asyncio.Protocol]
    refuse: Callable[[Refusal], bytes]
    screen: Callable[[str, Mapping[str, str]], Refusal | None]
    limits: Limits
    connections: set[ClientConnection]
    draining: bool
    loop: asyncio.AbstractEventLoop

    def add_connection(self, connection: ClientConnection) -> None:
        """Add an accepted connection."""
        ...

    def remove_connection(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed or has been passed to the fallback."""
        ...


def _ignore(*args: object) -> None:
    """Do nothing."""


_CLOSED_READER = RequestReader(Limits(), cast(Connection, None), _ignore, _ignore, _ignore)
_CLOSED_READER.closed = True


class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    Attributes:
        task: of the request in progress.
        stopping: the server stops and waits no longer.
    """

    __slots__ = (
        "_full",
        "_last_received_s",
        "_last_sent_s",
        "_limits",
        "_listener",
        "_lost",
        "_paused",
        "_reader",
        "_ready",
        "_ready_bytes",
        "_sent",
        "_server",
        "_transport",
        "_written",
        "stopping",
        "task",
    )

    def __init__(self, server: Server) -> None:
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._reader = RequestReader(
            self._limits, self, self._next, self._send_continue, server.screen
        )
        self._ready: deque[Request | Refusal] = deque()  # wait for the one in progress
        self._ready_bytes = 0  # of their bodies
        self._listener: Listener | None = None
        self._paused = False  # reading is paused while enough requests wait
        self._last_received_s = server.loop.time()
        self._full = False  # the write buffer is full
        self._written = self._sent = 0  # bytes
        self._last_sent_s = server.loop.time()
        self._lost = False

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the server, or refuse a connection too many (called by asyncio)."""
        self._transport = cast(asyncio.Transport, transport)
        is_one_too_many = len(self._server.connections) >= self._limits.connections
        self._server.add_connection(self)
        if is_one_too_many:
            self._reader.refuse(503, f"there are {self._limits.connections} connections already")
        elif self._server.draining:
            self._transport.close()  # accepted while the listener closed: stop() missed it

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request in progress and leave the server (called by asyncio)."""
        self._lost = True
        self._server.remove_connection(self)
        self._ready.clear()
        self._stop_reading()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse received data (called by asyncio)."""
        if not self._reader.closed:
            self._last_received_s = self._server.loop.time()
            self._reader.feed(data, self._last_received_s)

    def pause_writing(self) -> None:
        """Note that the write buffer is full (called by asyncio)."""
        self._full = True
        if self._listener is not None:
            self._listener.pause()

    def resume_writing(self) -> None:
        """Continue the response, or serve the next request (called by asyncio)."""
        self._full = False
        if self._listener is not None:
            self._listener.resume()
        elif self.task is None:
            self._serve_next()

    # -- one request after the other ----------------------------------------------------

    def _send_continue(self) -> None:
        if self.task is None and not self._reader.closed:  # not within another response
            self.write(_CONTINUE)

    def _next(self, request: Request | Refusal) -> None:
        if self.task is not None or self._full:
            self._ready.append(request)
            if isinstance(request, Request):
                self._ready_bytes += len(request.body)
            # Not earlier: a paused transport does not notice that the client disconnects.
            self._pause_reading(self._has_enough)
        else:
            self._serve(request)

    @property
    def _has_enough(self) -> bool:
        return len(self._ready) >= _MAX_READY or self._ready_bytes >= _MAX_READY_BYTES

    def _serve(self, request: Request | Refusal) -> None:
        if isinstance(request, Refusal):
            logger.info("refused: %d %s", request.status, request.message)
            body = self._server.refuse(request)
            unparsed = Request("", "", {}, b"", self, keep_alive=False, http_1_0=False)
            unparsed.respond(request.status, body, request.headers)
            self._linger()
        elif self.stopping:
            self._refuse_late(request)
            self._transport.close()
        elif request.path not in self._server.paths:
            self._pass_to_fallback(request)
        else:
            self.task = self._server.loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._server.handler(request)
        except asyncio.CancelledError:
            if self.stopping and not request.answered:
                self._refuse_late(request, counted=True)
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
        finally:
            self.task = self._listener = None
            if not self._lost:
                self._after(request)

    def _refuse_late(self, request: Request, counted: bool = False) -> None:
        refusal = Refusal(503, STOPPING, path=request.path, counted=counted)
        request.keep_alive = False
        request.respond(503, self._server.refuse(refusal), refusal.headers)

    def _after(self, request: Request) -> None:
        if not (request.ended and request.keep_alive) or self._server.draining:
            self._transport.close()
        elif not self._full:
            self._serve_next()
        self._last_received_s = self._server.loop.time()

    def _serve_next(self) -> None:
        if self._ready:
            request = self._ready.popleft()
            if isinstance(request, Request):
                self._ready_bytes -= len(request.body)
            self._pause_reading(self._has_enough)
            self._serve(request)

    def _linger(self) -> None:
        """Close the connection after the client has had time to read the response."""
        self._last_received_s = self._server.loop.time()
        self._pause_reading(False)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _pause_reading(self, paused: bool) -> None:
        if paused and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not paused:
            self._transport.resume_reading()
        self._paused = paused

    def _pass_to_fallback(self, request: Request) -> None:
        """Pass the connection and its request to the server of all other paths."""
        self._stop_reading()  # later requests are dropped: the connection closes after this one
        self._ready.clear()
        self._server.remove_connection(self)
        self._pause_reading(False)
        protocol = self._server.fallback()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._full:
            protocol.pause_writing()
        protocol.data_received(request.raw())

    def _stop_reading(self) -> None:
        self._reader.close()
        self._reader = _CLOSED_READER  # has no reference to this object

    # -- for responses ------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write to the client; does nothing on a lost connection."""
        if not self._lost:
            self._written += len(data)
            self._transport.write(data)

    def set_listener(self, listener: Listener | None) -> None:
        """Replace the listener for back-pressure; it is paused at once if the buffer is full."""
        self._listener = listener
        if listener is not None and self._full:
            listener.pause()

    # -- time ---------------------------------------------------------------------------

    def check_time(self, now_s: float) -> None:
        """Close the connection, or refuse its request, if a timeout has expired."""
        buffered = self._transport.get_write_buffer_size()
        if not buffered or self._written - buffered > self._sent:
            self._sent, self._last_sent_s = self._written - buffered, now_s
        if now_s - self._last_sent_s > self._limits.stall_s:
            logger.info("a client took nothing for %g s", self._limits.stall_s)
            self.abort()
        elif self.task is not None:
            pass
        elif self._reader.closed:
            if now_s - self._last_received_s > self._server.limits.linger_s:
                self.abort()
        elif self._reader.reading:
            since_s = self._reader.began_s if self._reader.in_head else self._last_received_s
            if now_s - since_s > self._limits.request_s:
                self._reader.refuse(
                    408, f"the request did not go on for {self._limits.request_s:g} s"
                )
        elif now_s - self._last_received_s > self._limits.idle_s:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection if it has no request, complete or not."""
        if self.task is None and not self._reader.reading and not self._ready:
            self._transport.close()

    def stop(self) -> None:
        """End the request in progress: a stream by a final event, any other one by a 503."""
        self.stopping = True
        if self._listener is not None:
            self._listener.stop()
        elif self.task is not None:
            self.task.cancel()
        elif self._reader.reading:
            self._reader.refuse(503, STOPPING)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
