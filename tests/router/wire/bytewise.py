"""A server of the token path, and a client that sends it raw bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from socket import AF_INET, IPPROTO_TCP, SOCK_STREAM, socket

from aiohttp import web

from router.wire.reading import Limits
from router.wire.request import Request
from router.wire.server import Handler, Screen, WireServer
from tests.waiting import HANG_S

HOST = b"Host: router\r\n"
TEXT = {"Content-Type": "text/plain"}


async def echo(request: Request) -> None:
    request.respond(200, request.body or b"nothing", TEXT)


def post(body: bytes, *headers: bytes, version: bytes = b"1.1", path: bytes = b"/echo") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/%b\r\n%b%b%b\r\n%b" % (
        *(path, version, HOST, length),
        *(b"".join(header + b"\r\n" for header in headers), body),
    )


LAST = b"Connection: close"
CHUNKED = b"Transfer-Encoding: chunked"


@asynccontextmanager
async def serving(
    handler: Handler = echo,
    limits: Limits | None = None,
    app: web.Application | None = None,
    screen: Screen = lambda path, headers: None,
) -> AsyncIterator[tuple[int, WireServer]]:
    runner = web.AppRunner(app or web.Application(), handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=("/echo",),
        handler=handler,
        fallback=runner.server,
        refuse=lambda refusal: refusal.message.encode(),
        screen=screen,
        limits=limits or Limits(),
    )
    listener = socket(AF_INET, SOCK_STREAM, IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    await server.start(listener)
    try:
        yield listener.getsockname()[1], server
    finally:
        await server.stop(1.0)
        await runner.cleanup()


async def say(port: int, *pieces: bytes) -> bytes:
    """Send pieces one by one, and return all bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()
    finally:
        writer.close()


def bodies(answers: bytes) -> list[bytes]:
    """Return the bodies of successive responses that have a Content-Length."""
    found: list[bytes] = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(answers[:size])
        answers = answers[size:]
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():  # noqa: ASYNC110 - connections have no event for it
            await asyncio.sleep(0)
