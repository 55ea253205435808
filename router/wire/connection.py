"""One connection of a client: its requests answered one after the other, and its times kept."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

from .reading import Limits, RequestReader
from .request import STOPPING, Connection, Listener, Refusal, Request

logger = logging.getLogger("ppd.router.http")

_MAX_READY = 16  # requests that a client may send ahead
_MAX_READY_BYTES = 1024 * 1024  # of their bodies; the last one may be larger
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Owner(Protocol):
    """The server, as a connection sees it."""

    paths: frozenset[str]
    handler: Callable[[Request], Awaitable[None]]
    elsewhere: Callable[[], asyncio.Protocol]
    refuse: Callable[[Refusal], bytes]
    screen: Callable[[str, Mapping[str, str]], Refusal | None]
    limits: Limits
    connections: set[ClientConnection]
    draining: bool
    loop: asyncio.AbstractEventLoop

    def came(self, connection: ClientConnection) -> None: ...

    def left(self, connection: ClientConnection) -> None: ...


def _nobody(*given: object) -> None:
    """Nothing comes any more."""


_GONE = RequestReader(Limits(), cast(Connection, None), _nobody, _nobody, _nobody)
_GONE.deaf = True


class ClientConnection(asyncio.Protocol):
    def __init__(self, server: Owner) -> None:
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._reader = RequestReader(self._limits, self, self._next, self._go_on, server.screen)
        self._ready: deque[Request | Refusal] = deque()  # behind the one that is served
        self._ready_bytes = 0  # of their bodies
        self._listener: Listener | None = None
        self._paused = False  # nothing is read while a request waits
        self._heard_s = server.loop.time()
        self._full = False  # the client is behind: its buffer here is full
        self._written = self._taken = 0  # bytes
        self._took_s = server.loop.time()
        self._lost = False

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        is_one_too_many = len(self._server.connections) >= self._limits.connections
        self._server.came(self)
        if is_one_too_many:
            self._reader.refuse(503, f"there are {self._limits.connections} connections already")
        elif self._server.draining:
            self._transport.close()  # accepted as the listener closed: nobody would look after it

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._server.left(self)
        self._ready.clear()
        self._stop_reading()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._reader.deaf:
            self._heard_s = self._server.loop.time()
            self._reader.feed(data, self._heard_s)

    def pause_writing(self) -> None:
        self._full = True
        if self._listener is not None:
            self._listener.pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._listener is not None:
            self._listener.resume()
        elif self.task is None:
            self._serve_next()

    # -- one request after the other ----------------------------------------------------

    def _go_on(self) -> None:
        if self.task is None and not self._reader.deaf:  # not in the midst of another answer
            self.write(_CONTINUE)

    def _next(self, request: Request | Refusal) -> None:
        if self.task is not None or self._full:
            self._ready.append(request)
            if isinstance(request, Request):
                self._ready_bytes += len(request.body)
            # Not sooner: who reads nothing does not see the client hang up.
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
            answer = Request("", "", {}, b"", self, keep_alive=False, http_1_0=False)
            answer.respond(request.status, body, request.headers)
            self._linger()
        elif self.stopping:
            self._refuse_late(request)
            self._transport.close()
        elif request.path not in self._server.paths:
            self._hand_over(request)
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
        self._heard_s = self._server.loop.time()

    def _serve_next(self) -> None:
        if self._ready:
            following = self._ready.popleft()
            if isinstance(following, Request):
                self._ready_bytes -= len(following.body)
            self._pause_reading(self._has_enough)
            self._serve(following)

    def _linger(self) -> None:
        """Close, when the client has or has had time to read our last word."""
        self._heard_s = self._server.loop.time()
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

    def _hand_over(self, request: Request) -> None:
        """To the application that serves all that is not on the token path."""
        self._stop_reading()  # what was sent behind it is not read: the connection will close
        self._ready.clear()
        self._server.left(self)
        self._pause_reading(False)
        protocol = self._server.elsewhere()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._full:
            protocol.pause_writing()
        protocol.data_received(request.raw())

    def _stop_reading(self) -> None:
        self._reader.close()
        self._reader = _GONE  # which does not lead back here

    # -- what an answer needs -----------------------------------------------------------

    def write(self, data: bytes) -> None:
        if not self._lost:
            self._written += len(data)
            self._transport.write(data)

    def set_listener(self, listener: Listener | None) -> None:
        self._listener = listener
        if listener is not None and self._full:
            listener.pause()

    # -- time ---------------------------------------------------------------------------

    def check_time(self, now_s: float) -> None:
        waiting = self._transport.get_write_buffer_size()
        if not waiting or self._written - waiting > self._taken:
            self._taken, self._took_s = self._written - waiting, now_s
        if now_s - self._took_s > self._limits.stall_s:
            logger.info("a client took nothing for %g s", self._limits.stall_s)
            self.abort()
        elif self.task is not None:
            pass
        elif self._reader.deaf:
            if now_s - self._heard_s > self._server.limits.linger_s:
                self.abort()
        elif self._reader.reading:
            since_s = self._reader.began_s if self._reader.in_head else self._heard_s
            if now_s - since_s > self._limits.request_s:
                self._reader.refuse(
                    408, f"the request did not go on for {self._limits.request_s:g} s"
                )
        elif now_s - self._heard_s > self._limits.idle_s:
            self._transport.close()

    def close_if_idle(self) -> None:
        if self.task is None and not self._reader.reading and not self._ready:
            self._transport.close()

    def stop(self) -> None:
        """A stream may tell its client that it ends here; whoever has no answer yet gets a 503."""
        self.stopping = True
        if self._listener is not None:
            self._listener.stop()
        elif self.task is not None:
            self.task.cancel()
        elif self._reader.reading:
            self._reader.refuse(503, STOPPING)

    def abort(self) -> None:
        self._transport.abort()
