"""The floor of ``bench-router``: copies bytes between a client and the decode worker.

It reads nothing of what it copies and asks no prefill worker: what it costs is what uvloop and the
kernel cost whoever is between two sockets. Run as
``python -m eval.bare_splice PORT WORKER_PORT``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class _Side(asyncio.Protocol):
    """One of a pair of connections; what comes before there is a pair is kept."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.other: _Side | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.abort()

    def join(self, other: _Side) -> None:
        self.other, other.other = other, self
        other.transport.write(b"".join(self._early))


class _Client(_Side):
    def __init__(self, worker_port: int) -> None:
        super().__init__()
        self._worker_port = worker_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(_Side, "127.0.0.1", self._worker_port)
        self.join(worker)


async def serve(port: int, worker_port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Client(worker_port), "127.0.0.1", port, backlog=8192)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
