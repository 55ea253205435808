"""The client's side: connections to workers, kept for the next request, and their answers."""

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


class Reader(Protocol):
    """Whoever reads an answer. After ``ended`` or ``failed`` nothing more comes."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def failed(self, error: Exception) -> None:
        """
        Args:
            error: ConnectError: nothing was sent. TimeoutError: nothing came for too long. Else
                the connection was lost, or what came is no HTTP.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """One for each worker: compared by identity, for it is looked up for every request."""

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@cache
def origin_of(url: str) -> Origin:
    """``url`` has been checked to have host and port."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Origin(parts.hostname, parts.port, parts.scheme == "https")


@cache
def _post_to(url: str, target: str) -> tuple[Origin, bytes]:
    """Where it goes, and the head up to the body's length."""
    origin = origin_of(url)
    fields = {"Host": origin.authority, "Content-Type": "application/json", "Content-Length": ""}
    return origin, request_head("POST", target, fields)[: -len("\r\n\r\n")]


class Upstreams:
    """Connections to all workers.

    Args:
        connect_s: for a connection to be made.
        answer_s: in which an answer must begin.
        silence_s: after which one that has begun must go on.
        keep_s: an idle connection is not used again after so long: the worker may be closing it.
    """

    def __init__(
        self, *, connect_s: float, answer_s: float, silence_s: float, keep_s: float
    ) -> None:
        self._connect_s = connect_s
        self._answer_s = answer_s
        self._silence_s = silence_s
        self._keep_s = keep_s
        self.loop = asyncio.get_running_loop()
        self._idle: defaultdict[Origin, list[Upstream]] = defaultdict(list)
        self._busy: set[Exchange] = set()
        self._sweeper = self.loop.create_task(self._sweep())

    def post(
        self, url: str, target: str, headers: Mapping[str, str], body: bytes, reader: Reader
    ) -> Exchange:
        """Send JSON; ``reader`` is told what comes of it, never before this returns."""
        origin, begun = _post_to(url, target)
        more = header_lines(headers) if headers else b""
        data = b"%b%d\r\n%b\r\n%b" % (begun, len(body), more, body)
        exchange = Exchange(self, origin, data, reader)
        self._busy.add(exchange)
        exchange.begin(self._reusable(origin))
        return exchange

    def _reusable(self, origin: Origin) -> Upstream | None:
        """The connection that was used last: the others may grow old."""
        idle = self._idle[origin]
        oldest_s = self.loop.time() - self._keep_s
        while idle:
            upstream = idle.pop()
            if upstream.usable and upstream.heard_s >= oldest_s:
                return upstream
            upstream.close()
        return None

    async def connect(self, origin: Origin) -> Upstream:
        """Raises: ConnectError."""
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

    def over(self, exchange: Exchange, upstream: Upstream | None) -> None:
        """``exchange`` has ended; ``upstream`` may serve another."""
        self._busy.discard(exchange)
        if upstream is not None:
            self._idle[exchange.origin].append(upstream)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._check_time(self.loop.time())
            except Exception:  # without it nothing would time out any more
                logger.exception("a timer failed")

    def _check_time(self, now_s: float) -> None:
        for exchange in list(self._busy):
            exchange.check_time(now_s, self._answer_s, self._silence_s)
        for idle in self._idle.values():
            while idle and now_s - idle[0].heard_s > self._keep_s:
                idle.pop(0).close()

    async def close(self) -> None:
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        for exchange in list(self._busy):
            exchange.close()
        for idle in self._idle.values():
            for upstream in idle:
                upstream.close()


class Exchange:
    """One request to a worker and its answer."""

    def __init__(self, upstreams: Upstreams, origin: Origin, data: bytes, reader: Reader) -> None:
        self.origin = origin
        self._upstreams = upstreams
        self._data = data
        self._reader: Reader | None = reader  # until it is over: it mostly holds us, too
        self._loop = upstreams.loop
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._held = False
        self._answered = False  # a first byte of the body has come
        self._began_s = self._loop.time()

    def begin(self, upstream: Upstream | None) -> None:
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
        if self._held:
            upstream.hold(True)

    # -- from the connection ------------------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        if self._reader is not None:
            self._reader.head(status, headers)

    def body(self, data: bytes) -> None:
        self._answered = True
        if self._reader is not None:
            self._reader.body(data)

    def ended(self, reusable: bool) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            if self._held and self._upstream is not None:
                self._upstream.hold(False)  # the next one shall be heard
            self._upstreams.over(self, self._upstream if reusable else None)
            reader.ended()

    def failed(self, error: Exception) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._upstreams.over(self, None)
            reader.failed(error)

    # -- from whoever asked -------------------------------------------------------------

    def hold(self, held: bool) -> None:
        """Read no further for now, or again."""
        self._held = held
        if self._upstream is not None and self._reader is not None:
            self._upstream.hold(held)

    def close(self) -> None:
        """Give up what has not ended: a worker learns by it that the request is aborted."""
        if self._reader is None:
            return
        self._reader = None
        self._upstreams.over(self, None)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()

    def check_time(self, now_s: float, answer_s: float, silence_s: float) -> None:
        if self._upstream is None or self._held:
            return  # connecting has a limit of its own; and who is held back is not silent
        limit_s = silence_s if self._answered else answer_s
        if now_s - max(self._began_s, self._upstream.heard_s) > limit_s:
            upstream = self._upstream
            self.failed(TimeoutError(f"nothing came for {limit_s:g} s"))
            upstream.close()
