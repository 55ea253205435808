"""A listening socket that loses no connection when it closes.

``asyncio.Server`` gives up a connection that is accepted in the step in which it closes
(cpython issue 109564): its client waits, and its socket stays open.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_BACKLOG = 4096


class Listener:
    """Accepts connections on 127.0.0.1 until it is closed.

    Args:
        factory: of the connections' protocols; it is also called for connections that were
            accepted just before :meth:`close`.
        port: 0 takes a free one.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, factory: Callable[[], asyncio.Protocol], port: int = 0) -> None:
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._socket = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Refuse further connections."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    async def wait_started(self) -> None:
        """Wait until all accepted connections have their protocols."""
        await asyncio.gather(*self._starting)

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(
                self._loop.connect_accepted_socket(self._factory, connection)
            )
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
