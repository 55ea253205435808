"""A fake SGLang worker: real sockets, no computation.

A script answers each generation request. Several workers fit into one process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson

from .connection import WorkerConnection
from .listener import Listener
from .request import Leg, Request, Script, reset
from .state import WorkerState

_MAX_LEGS = 1000
FLAP = "/flap"


@dataclass(slots=True, eq=False)
class FakeWorker(WorkerState):
    """A worker on a port of its own, in this process.

    Attributes:
        script: answers each generation request; it may be replaced at any time.
        legs: the last generation requests.
        arrived: set by each generation request.
        hung_up: set when a connection closes before its answer has ended.
        connections: the open connections.
    """

    script: Script
    legs: deque[Leg] = field(default_factory=lambda: deque(maxlen=_MAX_LEGS))
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[ScriptedConnection] = field(default_factory=set)
    _listener: Listener | None = None

    @property
    def url(self) -> str:
        """The base URL of the worker."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[Any]:
        """The JSON bodies of the last generation requests."""
        return [orjson.loads(leg.body) for leg in self.legs]

    @property
    def headers(self) -> list[dict[str, str]]:
        """The headers of the last generation requests, by lower-case name."""
        return [leg.headers for leg in self.legs]

    @property
    def is_listening(self) -> bool:
        """Whether new connections are accepted."""
        return self._listener is not None

    async def listen(self, port: int = 0) -> None:
        """Serve on a port; without one, on the same port as before."""
        self._listener = Listener(lambda: ScriptedConnection(self), port or self.port)
        self.port = self._listener.port

    def vanish(self) -> None:
        """Break all connections and refuse new ones, as when the process dies."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.reset()

    async def close(self) -> None:
        """Stop serving, and wait until all connections have ended."""
        connections, listener = set(self.connections), self._listener
        self.vanish()
        if listener is not None:
            await listener.wait_started()
        connections |= self.connections
        await asyncio.gather(*(connection.wait_ended() for connection in connections))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeWorker]:
        """Serve inside the context, on the same port each time."""
        await self.listen()
        try:
            yield self
        finally:
            await self.close()

    async def restart(self) -> None:
        """Serve again, as another process would."""
        self.boot_id = uuid4().hex
        await self.listen()

    def flap(self, down_s: float) -> None:
        """Cut the worker off from the network for a while; its state is kept."""
        loop = asyncio.get_running_loop()
        self.vanish()
        loop.call_later(down_s, lambda: loop.create_task(self.listen()))


class ScriptedConnection(WorkerConnection):
    """One connection to a :class:`FakeWorker`."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker)
        self._lost = asyncio.Event()
        self._worker = worker
        self._headers: dict[str, str] = {}
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection; break it if it was accepted while the worker vanished."""
        super().connection_made(transport)
        self._worker.connections.add(self)
        if not self._worker.is_listening:
            self.reset()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the script, and record that its request was given up."""
        super().connection_lost(exc)
        self._worker.connections.discard(self)
        self._lost.set()
        if self._request is not None and not self._request.ended:
            self._request.ended = True
            self._request.leg.given_up_s = time.monotonic()
            self._worker.hung_up.set()
        if self._task is not None:
            self._task.cancel()

    def on_message_begin(self) -> None:
        """Discard the parts of the previous request."""
        super().on_message_begin()
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def reset(self) -> None:
        """Reset the connection, as a network or a dying process does."""
        if self._request is not None:
            self._request.ended = True
        reset(self._transport)

    async def wait_ended(self) -> None:
        """Wait until the connection and its script have ended."""
        await self._lost.wait()
        if self._task is not None:
            await asyncio.wait((self._task,))

    def control(self, path: str, body: bytes) -> object | None:
        """Take the command to cut the worker off from the network."""
        if path != FLAP:
            return None
        # Later, because this connection is one of those that break.
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, self._worker.flap, orjson.loads(body)["down_s"])
        return {}

    def generate(self, path: str, body: bytes) -> None:
        """Record a generation request, and start the worker's script."""
        leg = Leg(path, self._headers, body, time.monotonic())
        self._worker.legs.append(leg)
        self._worker.arrived.set()
        self._request = Request(self._worker, leg, self._transport)
        self._task = asyncio.get_running_loop().create_task(self._run(self._request))

    async def _run(self, request: Request) -> None:
        try:
            await self._worker.script(request)
            request.end()
        except Exception:
            self._transport.abort()  # a bug of the script must not look like a silent worker
            raise
