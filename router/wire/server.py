"""The server's side: connections of clients, read strictly, one request at a time each.

llhttp refuses what smuggling is made of (both lengths, odd transfer codings, bare line ends,
folded headers). Added here: one Host, no codings in HTTP/1.0, sizes, times.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from socket import socket
from typing import cast

import httptools

from .request import Listener, Refusal, Request

logger = logging.getLogger("ppd.router.http")

Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Refusal], bytes]

_ONCE = ("host", "authorization", "content-type", "content-encoding")
_BODY_HEADERS = {"content-length", "transfer-encoding"}
_MOST_READY = 16  # requests that a client may send ahead
_SWEEP_S = 1.0
_LINGER_S = 2.0  # for a client to read why it was refused, before what it still sends resets us
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Attributes:
        head_bytes: of a request's target and headers.
        body_bytes: of its body, decoded.
        request_s: for a head to arrive, and for a body to go on.
        idle_s: between two requests of a connection.
        stall_s: in which a client takes nothing of what is there for it.
    """

    head_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    request_s: float = 30.0
    idle_s: float = 75.0
    stall_s: float = 60.0


class WireServer:
    """
    Args:
        paths: that ``handler`` answers; connections that ask for anything else are handed to
            ``elsewhere``'s protocol, for that one request.
        handler: must answer; what it raises has been answered by it.
        refuse: told of every refusal; gives its body, JSON.
    """

    def __init__(
        self,
        *,
        paths: Collection[str],
        handler: Handler,
        elsewhere: Callable[[], asyncio.Protocol],
        refuse: Refuse,
        limits: Limits,
    ) -> None:
        self.paths = frozenset(paths)
        self.handler = handler
        self.elsewhere = elsewhere
        self.refuse = refuse
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._left = asyncio.Event()

    def left(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self._left.set()

    async def start(self, listener: socket, tls: ssl.SSLContext | None = None) -> None:
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), sock=listener, ssl=tls, backlog=1024
        )
        self._sweeper = self.loop.create_task(self._sweep())

    async def stop(self, grace_s: float) -> None:
        """No new connections; requests under way have ``grace_s`` to end."""
        assert self._server is not None
        assert self._sweeper is not None
        self.draining = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(grace_s):
                while self.connections:  # until what they were last told has been taken
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            logger.warning("%d requests did not end in time", len(self.connections))
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        """Timers of all connections: one for each would cost more than the requests."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self.loop.time()
            for connection in list(self.connections):
                try:
                    connection.check_time(now_s)
                except Exception:  # without it nothing would time out any more
                    logger.exception("a timer failed")


class ClientConnection(asyncio.Protocol):
    def __init__(self, server: WireServer) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._ready: deque[Request | Refusal] = deque()  # behind the one that is served
        self._listener: Listener | None = None
        self._deaf = False  # what the client sends from now on is not read
        self._paused = False  # nothing is read while a request waits
        self._heard_s = server.loop.time()
        self._full = False  # the client is behind: its buffer here is full
        self._written = self._taken = 0  # bytes
        self._took_s = server.loop.time()
        self._lost = False
        self._reading = False
        self._in_head = False
        self._in_body = False

    def on_message_begin(self) -> None:
        self._reading = self._in_head = True
        self._began_s = self._heard_s
        self._in_body = False
        self._head_bytes = self._open_bytes = self._body_bytes = self._framing_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._server.left(self)
        self._ready.clear()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._heard_s = self._server.loop.time()
        in_body, body_bytes = self._in_body, self._body_bytes if self._in_body else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # the request is answered in HTTP/1.1; then the connection closes
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no valid HTTP request: {error}")
        if self._in_head:  # the parser tells of a header when it is whole: it may never be
            self._open_bytes += len(data)
            self._check_head(self._open_bytes)
        elif in_body and self._in_body:  # nor does it tell of chunk sizes and trailers
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > self._limits.head_bytes + self._body_bytes:
                self._refuse(400, "the body is nearly all chunk sizes or trailers")

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

    # -- the parser ---------------------------------------------------------------------

    def on_url(self, target: bytes) -> None:
        self._target += target
        self._head_bytes += len(target)
        self._check_head(self._head_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody here asks for one
        self._head_bytes += len(name) + len(value)
        self._check_head(self._head_bytes)
        key, text = name.decode("latin-1").lower(), value.decode(errors="surrogateescape")
        before = self._headers.get(key)
        if before is None:
            self._headers[key] = text
        elif key in _ONCE:
            self._refuse(400, f"{key} is given twice")
        else:
            self._headers[key] = f"{before}, {text}"

    def _check_head(self, size: int) -> None:
        if size > self._limits.head_bytes:
            self._refuse(431, f"the headers are larger than {self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        version, headers = self._parser.get_http_version(), self._headers
        if self._parser.get_method() == b"CONNECT":
            self._refuse(400, "this is no proxy")
        elif self._parser.should_upgrade() and headers.keys() & _BODY_HEADERS:
            self._refuse(400, "no protocol is changed to here, and the parser skips the body")
        elif version not in ("1.0", "1.1"):
            self._refuse(505, f"HTTP/{version} is not served, but HTTP/1.1 is")
        elif version == "1.1" and "host" not in headers:
            self._refuse(400, "the Host header is missing")
        elif version == "1.0" and "transfer-encoding" in headers:
            self._refuse(400, "HTTP/1.0 knows no Transfer-Encoding")
        elif headers.get("content-encoding", "identity") != "identity":
            self._refuse(415, f"Content-Encoding {headers['content-encoding']} is not read")
        elif int(headers.get("content-length", 0)) > self._limits.body_bytes:
            self._refuse_body()
        elif (
            headers.get("expect", "").lower() == "100-continue"
            and version == "1.1"
            and self.task is None  # not in the midst of another answer
            and not self._deaf
        ):
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._deaf:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_body()
        else:
            self._body.append(data)

    def _refuse_body(self) -> None:
        self._refuse(413, f"the body is larger than {self._limits.body_bytes} bytes")

    def on_message_complete(self) -> None:
        self._reading = self._in_body = False
        if self._deaf:
            return
        body = self._body
        self._next(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                target=_origin_form(self._target.decode("latin-1")),
                headers=self._headers,
                body=body[0] if len(body) == 1 else b"".join(body),
                connection=self,
                keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
                http_1_0=self._parser.get_http_version() == "1.0",
            )
        )

    # -- one request after the other ----------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        if not self._deaf:
            self._deaf = True
            self._next(Refusal(status, message))

    def _next(self, request: Request | Refusal) -> None:
        if self.task is not None or self._full:
            self._ready.append(request)
            # Not sooner: who reads nothing does not see the client hang up.
            self._pause_reading(len(self._ready) >= _MOST_READY)
        else:
            self._serve(request)

    def _serve(self, request: Request | Refusal) -> None:
        if isinstance(request, Refusal):
            logger.info("refused: %d %s", request.status, request.message)
            body = self._server.refuse(request)
            answer = Request("", "", {}, b"", self, keep_alive=False, http_1_0=False)
            answer.respond(request.status, body, {"Content-Type": "application/json"})
            self._linger()
        elif request.path not in self._server.paths:
            self._hand_over(request)
        else:
            self.task = self._server.loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._server.handler(request)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
        finally:
            self.task = self._listener = None
            if not self._lost:
                self._after(request)

    def _after(self, request: Request) -> None:
        if not (request.ended and request.keep_alive) or self._server.draining:
            self._transport.close()
        elif not self._full:
            self._serve_next()
        self._heard_s = self._server.loop.time()

    def _serve_next(self) -> None:
        if self._ready:
            following = self._ready.popleft()
            self._pause_reading(len(self._ready) >= _MOST_READY)
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
        self._deaf = True  # what was sent behind it is not read: the connection will close
        self._ready.clear()
        self._server.left(self)
        self._pause_reading(False)
        protocol = self._server.elsewhere()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._full:
            protocol.pause_writing()
        protocol.data_received(request.raw())

    # -- what an answer needs -----------------------------------------------------------

    def write(self, data: bytes) -> None:
        if not self._lost:
            self._written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def heed(self, listener: Listener | None) -> None:
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
        elif self._deaf:
            if now_s - self._heard_s > _LINGER_S:
                self.abort()
        elif self._reading:
            since_s = self._began_s if self._in_head else self._heard_s
            if now_s - since_s > self._limits.request_s:
                self._refuse(408, f"the request did not go on for {self._limits.request_s:g} s")
        elif now_s - self._heard_s > self._limits.idle_s:
            self._transport.close()

    def close_if_idle(self) -> None:
        if self.task is None and not self._reading and not self._ready:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def _origin_form(target: str) -> str:
    """A target as most clients send it; proxies' clients put scheme and host before it."""
    if target.startswith(("http://", "https://")):
        return "/" + target.partition("://")[2].partition("/")[2]
    return target
