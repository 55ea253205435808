"""The floors of ``bench router``: copies bytes between a client and the decode worker.

It parses nothing. So it costs what uvloop and the kernel cost any program between two sockets. With
a prefill worker it sends that one the same bytes, and drops its answer: the least that the two legs
of a remote turn can cost. Run as ``python -m eval.routers.splice PORT WORKER_PORT [PREFILL_PORT]``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class _Side(asyncio.Protocol):
    """A connection; what comes is copied to ``to``, and kept before there is any."""

    def __init__(self, *to: _Side) -> None:
        self.transport: asyncio.Transport
        self._to = to
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._to:
            self._early.append(data)
        for other in self._to:
            other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        for other in self._to:
            other.transport.abort()

    def copy_to(self, *to: _Side) -> None:
        self._to = to
        for other in to:
            other.transport.write(b"".join(self._early))


class _Dropping(_Side):
    """A prefill worker's."""

    def data_received(self, data: bytes) -> None:
        pass


class _Client(_Side):
    def __init__(self, worker_port: int, prefill_port: int | None) -> None:
        super().__init__()
        self._worker_port = worker_port
        self._prefill_port = prefill_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        legs: list[_Side] = []
        if self._prefill_port is not None:
            _, prefill = await loop.create_connection(_Dropping, "127.0.0.1", self._prefill_port)
            legs.append(prefill)
        _, worker = await loop.create_connection(
            lambda: _Side(self), "127.0.0.1", self._worker_port
        )
        self.copy_to(*legs, worker)


async def serve(port: int, worker_port: int, prefill_port: int | None) -> None:
    """Copy bytes until the process ends."""
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: _Client(worker_port, prefill_port), "127.0.0.1", port, backlog=8192
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    ports = [int(one) for one in sys.argv[1:]]
    uvloop.run(serve(ports[0], ports[1], ports[2] if ports[2:] else None))
