"""The server's side: it accepts clients, keeps their timers and stops in good order."""

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
    """
    Args:
        paths: that ``handler`` answers; connections that ask for anything else are handed to
            ``elsewhere``'s protocol, for that one request.
        handler: must answer; what it raises has been answered by it.
        refuse: told of every refusal; gives its body, JSON.
        screen: given path and headers of a request with a large body before that is read; gives a
            reason not to read it.
    """

    def __init__(
        self,
        *,
        paths: Collection[str],
        handler: Handler,
        elsewhere: Callable[[], asyncio.Protocol],
        refuse: Refuse,
        screen: Screen,
        limits: Limits,
    ) -> None:
        self.paths = frozenset(paths)
        self.handler = handler
        self.elsewhere = elsewhere
        self.refuse = refuse
        self.screen = screen
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._left = asyncio.Event()

    def came(self, connection: ClientConnection) -> None:
        self.connections.add(connection)

    def left(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self._left.set()

    async def start(self, listener: socket, tls: ssl.SSLContext | None = None) -> None:
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), sock=listener, ssl=tls, backlog=1024
        )
        self._sweeper = self.loop.create_task(self._sweep())

    async def stop(self, grace_s: float) -> None:
        """No new connections; requests under way have ``grace_s`` to end, then one more moment for
        their last words."""
        assert self._server is not None
        assert self._sweeper is not None
        self.draining = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        if not await self._all_left(grace_s):
            logger.warning("%d requests did not end in time", len(self.connections))
            for connection in list(self.connections):
                try:
                    connection.stop()
                except Exception:  # of a listener: the others shall have their last words
                    logger.exception("last words failed")
            await self._all_left(self.limits.linger_s)
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _all_left(self, within_s: float) -> bool:
        """Until what they were last told has been taken."""
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

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
