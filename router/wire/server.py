"""The HTTP server: it accepts clients, checks their timeouts and stops gracefully."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from socket import socket

from .connection import ClientConnection
from .reading import Limits
from .request import Refusal, Request

logger = logging.getLogger("ppd.router.http")

Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Refusal], bytes]
Screen = Callable[[str, Mapping[str, str]], Refusal | None]

_SWEEP_S = 1.0


class WireServer:
    """The server of the token path, with a fallback for all other paths.

    Args:
        paths: that ``handler`` serves. A connection that requests any other path is passed to
            a protocol of ``fallback``, together with that request, and is closed after it.
        handler: serves a request. It must write a response, also if it raises.
        fallback: creates the asyncio protocol for other paths.
        refuse: is called with every refusal and returns its body, JSON.
        screen: is called with path and headers of a request before its large body is read. It
            returns a refusal, or None to read the body.
        limits: sizes, times and the number of connections.

    Attributes:
        connections: the open ones that have not been passed to ``fallback``.
        draining: the server accepts no further requests.
    """

    def __init__(
        self,
        *,
        paths: Collection[str],
        handler: Handler,
        fallback: Callable[[], asyncio.Protocol],
        refuse: Refuse,
        screen: Screen,
        limits: Limits,
    ) -> None:
        self.paths = frozenset(paths)
        self.handler = handler
        self.fallback = fallback
        self.refuse = refuse
        self.screen = screen
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._connection_removed = asyncio.Event()

    def add_connection(self, connection: ClientConnection) -> None:
        """Add an accepted connection."""
        self.connections.add(connection)

    def remove_connection(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed or has been passed to the fallback."""
        self.connections.discard(connection)
        self._connection_removed.set()

    async def start(self, listener: socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on a bound socket."""
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), sock=listener, ssl=tls, backlog=1024
        )
        self._sweeper = self.loop.create_task(self._sweep())

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections and wait for requests in flight.

        Args:
            grace_s: time for requests to end. Streams that are still open then get a final
                event, and all other requests a 503.
        """
        assert self._server is not None
        assert self._sweeper is not None
        self.draining = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        if not await self._all_closed(grace_s):
            logger.warning("%d requests did not end in time", len(self.connections))
            for connection in list(self.connections):
                try:
                    connection.stop()
                except Exception:  # of one listener must not affect the others
                    logger.exception("a final event failed")
            await self._all_closed(self.limits.linger_s)
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _all_closed(self, within_s: float) -> bool:
        """Return whether all connections close in time."""
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._connection_removed.clear()
                    await self._connection_removed.wait()
        except TimeoutError:
            return False
        return True

    async def _sweep(self) -> None:
        """Check the timeouts of all connections.

        A timer for each connection would cost more than the requests.
        """
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self.loop.time()
            for connection in list(self.connections):
                try:
                    connection.check_time(now_s)
                except Exception:  # if this task ended, nothing would time out any more
                    logger.exception("a timer failed")
