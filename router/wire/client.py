"""The HTTP client for workers: reusable connections, requests and the responses to them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from urllib.parse import urlsplit

from .errors import ConnectError
from .heads import header_lines, request_head
from .upstream import Upstream

logger = logging.getLogger("ppd.router.http")

_SWEEP_S = 1.0


class ResponseListener(Protocol):
    """The callbacks for one response. ``ended`` or ``failed`` is the last one."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers, which have lower-case names."""
        ...

    def body(self, data: bytes) -> None:
        """Receive a part of the body."""
        ...

    def ended(self) -> None:
        """Receive the end of a complete response."""
        ...

    def failed(self, error: Exception) -> None:
        """Receive the failure of the request.

        Args:
            error: a ConnectError if nothing was sent; a TimeoutError if no data arrived for too
                long. Otherwise the connection was lost, or the response was not valid HTTP.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Host, port and scheme of a worker.

    There is one object for each URL. It is compared by identity, which keeps the look-up of every
    request cheap.
    """

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@cache
def origin_of(url: str) -> Origin:
    """Return the origin of a URL, which must have a host and a port."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Origin(parts.hostname, parts.port, parts.scheme == "https")


@cache
def _post_to(url: str, target: str) -> tuple[Origin, bytes]:
    """Return the origin of a POST request, and its head up to the value of Content-Length."""
    origin = origin_of(url)
    fields = {"Host": origin.authority, "Content-Type": "application/json", "Content-Length": ""}
    return origin, request_head("POST", target, fields)[: -len("\r\n\r\n")]


class Upstreams:
    """The connections to all workers.

    Args:
        connect_s: limit on the establishment of a connection.
        answer_s: limit on the time until the body of a response begins.
        idle_s: limit on a pause within the body of a response.
        reuse_s: age from which an idle connection is not reused: the worker may be closing it.
    """

    def __init__(self, *, connect_s: float, answer_s: float, idle_s: float, reuse_s: float) -> None:
        self._connect_s = connect_s
        self._answer_s = answer_s
        self._idle_s = idle_s
        self._reuse_s = reuse_s
        self.loop = asyncio.get_running_loop()
        self._idle: defaultdict[Origin, list[Upstream]] = defaultdict(list)
        self._busy: set[Exchange] = set()
        self._sweeper = self.loop.create_task(self._sweep())

    def post(
        self,
        url: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        listener: ResponseListener,
    ) -> Exchange:
        """Send a POST request with a JSON body.

        Args:
            url: base URL of the worker.
            target: path and query.
            headers: further headers.
            body: JSON.
            listener: receives the response. It is never called before this method returns.
        """
        origin, head = _post_to(url, target)
        more = header_lines(headers) if headers else b""
        data = b"%b%d\r\n%b\r\n%b" % (head, len(body), more, body)
        exchange = Exchange(self, origin, data, listener)
        self._busy.add(exchange)
        exchange.begin(self._take_idle(origin))
        return exchange

    def _take_idle(self, origin: Origin) -> Upstream | None:
        """Remove and return the idle connection that was used last; None if there is none."""
        idle = self._idle[origin]
        oldest_s = self.loop.time() - self._reuse_s
        while idle:
            upstream = idle.pop()
            if upstream.usable and upstream.last_received_s >= oldest_s:
                return upstream
            upstream.close()
        return None

    async def connect(self, origin: Origin) -> Upstream:
        """Open a connection.

        Raises:
            ConnectError: it could not be established in time.
        """
        try:
            async with asyncio.timeout(self._connect_s):
                _, upstream = await self.loop.create_connection(
                    lambda: Upstream(self.loop),
                    origin.host,
                    origin.port,
                    ssl=origin.tls or None,
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise ConnectError(error.errno, str(error)) from error
        return upstream

    def finish(self, exchange: Exchange, upstream: Upstream | None) -> None:
        """Remove an exchange that has ended.

        Args:
            exchange: that has ended.
            upstream: its connection, if it can be reused.
        """
        self._busy.discard(exchange)
        if upstream is not None:
            self._idle[exchange.origin].append(upstream)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._check_time(self.loop.time())
            except Exception:  # if this task ended, nothing would time out any more
                logger.exception("a timer failed")

    def _check_time(self, now_s: float) -> None:
        for exchange in list(self._busy):
            exchange.check_time(now_s, self._answer_s, self._idle_s)
        for idle in self._idle.values():
            while idle and now_s - idle[0].last_received_s > self._reuse_s:
                idle.pop(0).close()

    async def close(self) -> None:
        """Close all connections and abort the exchanges in flight."""
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        for exchange in list(self._busy):
            exchange.close()
        for idle in self._idle.values():
            for upstream in idle:
                upstream.close()


class Exchange:
    """One request to a worker and its response."""

    __slots__ = (
        "_answered",
        "_began_s",
        "_connecting",
        "_data",
        "_listener",
        "_loop",
        "_paused",
        "_upstream",
        "_upstreams",
        "origin",
    )

    def __init__(
        self, upstreams: Upstreams, origin: Origin, data: bytes, listener: ResponseListener
    ) -> None:
        self.origin = origin
        self._upstreams = upstreams
        self._data = data
        self._listener: ResponseListener | None = listener  # None once it has ended: avoids a cycle
        self._loop = upstreams.loop
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._paused = False
        self._answered = False  # the body has begun
        self._began_s = self._loop.time()

    def begin(self, upstream: Upstream | None) -> None:
        """Send the request on ``upstream``, or on a new connection if it is None."""
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self._upstreams.connect(self.origin)
        except ConnectError as error:
            self.failed(error)
        except Exception as error:
            logger.exception("no connection to %s", self.origin.authority)
            self.failed(ConnectError(repr(error)))
        else:
            self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self._upstream, self._connecting = upstream, None
        upstream.serve(self, self._data)
        self._data = b""
        if self._paused:
            upstream.pause_reading()

    # -- from the connection ------------------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Pass the head of the response on."""
        if self._listener is not None:
            self._listener.head(status, headers)

    def body(self, data: bytes) -> None:
        """Pass a part of the body on."""
        self._answered = True
        if self._listener is not None:
            self._listener.body(data)

    def ended(self, reusable: bool) -> None:
        """End the exchange after a complete response."""
        listener, self._listener = self._listener, None
        if listener is not None:
            if self._paused and self._upstream is not None:
                self._upstream.resume_reading()  # for the next exchange
            self._upstreams.finish(self, self._upstream if reusable else None)
            listener.ended()

    def failed(self, error: Exception) -> None:
        """End the exchange after a failure."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._upstreams.finish(self, None)
            listener.failed(error)

    # -- from the caller ----------------------------------------------------------------

    def pause_reading(self) -> None:
        """Take no more from the worker for now."""
        self._paused = True
        if self._upstream is not None and self._listener is not None:
            self._upstream.pause_reading()

    def resume_reading(self) -> None:
        """Take more from the worker again."""
        self._paused = False
        if self._upstream is not None and self._listener is not None:
            self._upstream.resume_reading()

    def close(self) -> None:
        """Abort the exchange if it has not ended: the worker's connection is closed."""
        if self._listener is None:
            return
        self._listener = None
        self._upstreams.finish(self, None)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()

    def check_time(self, now_s: float, answer_s: float, idle_s: float) -> None:
        """Fail the exchange if its worker has sent nothing for too long."""
        if self._upstream is None or self._paused:
            return  # connecting has its own limit; while reading is paused, nothing can arrive
        limit_s = idle_s if self._answered else answer_s
        if now_s - max(self._began_s, self._upstream.last_received_s) > limit_s:
            upstream = self._upstream
            self.failed(TimeoutError(f"nothing came for {limit_s:g} s"))
            upstream.close()
