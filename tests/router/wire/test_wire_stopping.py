"""The token path's own HTTP server: how it stops."""

from __future__ import annotations

import asyncio
from socket import socketpair

import pytest

from router.wire.connection import ClientConnection
from router.wire.request import Request

from .bytewise import TEXT, bodies, echo, post, say, serving, until


async def test_a_server_that_stops_lets_requests_end_and_idle_clients_go() -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> None:
        begun.set()
        await gate.wait()
        await echo(request)

    async with serving(wait) as (port, server):
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        busy = asyncio.create_task(say(port, post(b"late")))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(10.0))
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        gate.set()
        assert bodies(await busy) == [b"late"]
        await stopping
        idle_writer.close()


async def test_a_server_that_waits_no_longer_gives_last_words() -> None:
    """A request without a response gets a 503; a stream writes its final event."""
    streams, waits = asyncio.Event(), asyncio.Event()

    class Stream:
        def __init__(self, request: Request) -> None:
            self.stopped = asyncio.Event()
            request.connection.set_listener(self)
            request.start(200, TEXT, b"begun ")

        def pause(self) -> None: ...

        def resume(self) -> None: ...

        def stop(self) -> None:
            self.stopped.set()

    async def serve(request: Request) -> None:
        if request.body == b"stream":
            stream = Stream(request)
            streams.set()
            await stream.stopped.wait()
            assert request.connection.stopping
            request.write(b"ended")
            request.end()
        else:
            waits.set()
            await asyncio.Event().wait()

    async with serving(serve) as (port, server):
        stream = asyncio.create_task(say(port, post(b"stream")))
        waiting = asyncio.create_task(say(port, post(b"whole")))
        await asyncio.gather(streams.wait(), waits.wait())
        await server.stop(0.01)
        assert (await stream).endswith(b"5\r\nended\r\n0\r\n\r\n")
        answer = await waiting
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert bodies(answer) == [b"the router is stopping"]


async def test_a_request_that_is_half_there_when_a_server_stops_is_refused() -> None:
    async def never(request: Request) -> None:
        raise AssertionError(request)

    async with serving(never) as (port, server):
        asked = asyncio.create_task(say(port, post(b"abc")[:-1]))
        await until(lambda: any(one._reader.reading for one in server.connections))
        await server.stop(0.01)
        answer = await asked
        assert (answer.startswith(b"HTTP/1.1 503 "), bodies(answer)) == (
            True,
            [b"the router is stopping"],
        )


async def test_who_is_accepted_while_a_server_stops_is_let_go() -> None:
    async with serving() as (_, server):
        await server.stop(1.0)
        ours, theirs = socketpair()
        ours.setblocking(False)
        connection = ClientConnection(server)
        await server.loop.connect_accepted_socket(lambda: connection, theirs)
        with ours:
            assert await server.loop.sock_recv(ours, 1) == b""
        assert not server.connections


async def test_a_server_that_stops_lets_answers_be_read() -> None:
    size, begun = 20_000_000, asyncio.Event()

    async def large(request: Request) -> None:
        request.respond(200, b"x" * size, TEXT)
        begun.set()

    async with serving(large) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b""))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(10.0))
        assert len(bodies(await reader.read())[0]) == size
        await stopping
        writer.close()
