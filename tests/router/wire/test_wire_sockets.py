"""What the kernel is asked of connections, to clients and to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from typing import Any

import pytest
import uvloop

from router.wire.client import Upstreams, origin_of
from router.wire.request import Request

from .bytewise import LAST, TEXT, post, say, serving


def nodelay(transport: asyncio.BaseTransport) -> int:
    its: socket = transport.get_extra_info("socket")
    return its.getsockopt(IPPROTO_TCP, TCP_NODELAY)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_small_parts_are_sent_at_once(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Nagle's algorithm would keep a token until the one before it is acknowledged."""
    seen: list[int] = []
    server: Any = None

    async def handler(request: Request) -> None:
        (connection,) = server.connections
        seen.append(nodelay(connection._transport))
        request.respond(200, b"", TEXT)

    async def both() -> None:
        nonlocal server
        async with serving(handler) as (port, server):
            await say(port, post(b"x", LAST))
            upstreams = Upstreams(connect_s=5.0, answer_s=5.0, idle_s=5.0, reuse_s=5.0)
            upstream = await upstreams.connect(origin_of(f"http://127.0.0.1:{port}"))
            seen.append(nodelay(upstream._transport))
            upstream.close()
            await upstreams.close()

    run(both())
    assert all(seen)
    assert len(seen) == 2
