"""The token path's own HTTP server: slow and silent clients, and many; what it hands over."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from router.wire import server as wire_server
from router.wire.connection import ClientConnection
from router.wire.reading import Limits
from router.wire.request import Request

from .bytewise import LAST, TEXT, bodies, post, say, serving, until


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_server, "_SWEEP_S", 0.01)


@pytest.mark.usefixtures("quick_sweeps")
@pytest.mark.parametrize("begun", [b"POST /ec", post(b"abc")[:-1]])
async def test_a_request_that_does_not_go_on_is_given_up(begun: bytes) -> None:
    async with serving(limits=Limits(request_s=0.05)) as (port, _):
        assert (await say(port, begun)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("quick_sweeps")
async def test_an_idle_connection_is_closed() -> None:
    async with serving(limits=Limits(idle_s=0.05)) as (port, _):
        assert bodies(await say(port, post(b"one"))) == [b"one"]
        assert await say(port) == b""


@pytest.mark.parametrize("asked", [1, 2])
async def test_a_client_that_hangs_up_is_noticed(asked: int) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(wait) as (port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"") * asked)
        await begun.wait()
        writer.close()
        await cancelled.wait()
        assert not server.connections


class Flow:
    """Writes as long as the client takes it."""

    def __init__(self) -> None:
        self.paused, self.resumed = asyncio.Event(), asyncio.Event()
        self.sent = 0
        self.lost = asyncio.Event()

    def pause(self) -> None:
        self.paused.set()

    def resume(self) -> None:
        self.resumed.set()

    def stop(self) -> None:
        raise AssertionError("no server stops here")

    async def pour(self, request: Request) -> None:
        request.connection.set_listener(self)
        request.start(200, TEXT, b"x")
        while not self.paused.is_set():
            request.write(b"x" * 65_536)
            self.sent += 1
            await asyncio.sleep(0)
        try:
            await self.resumed.wait()
        except asyncio.CancelledError:
            self.lost.set()
            raise
        request.end()


async def test_a_slow_client_holds_its_stream_back() -> None:
    flow = Flow()
    async with serving(flow.pour) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", LAST))
        await flow.paused.wait()
        received = await reader.read()
        writer.close()
    assert flow.resumed.is_set()
    assert received.partition(b"\r\n\r\n")[2].count(b"x") == 1 + 65_536 * flow.sent


@pytest.mark.usefixtures("quick_sweeps")
async def test_a_client_that_takes_nothing_is_given_up() -> None:
    flow = Flow()
    async with serving(flow.pour, Limits(stall_s=0.05)) as (port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b""))
        await flow.paused.wait()
        await flow.lost.wait()
        assert not server.connections
        writer.close()
    assert not flow.resumed.is_set()


async def test_a_client_that_reads_nothing_is_not_answered_further() -> None:
    served = 0

    async def large(request: Request) -> None:
        nonlocal served
        served += 1
        request.respond(200, b"x" * 4_000_000, TEXT)

    async with serving(large) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"") * 11 + post(b"", LAST))
        await writer.drain()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert served < 12
        assert len(bodies(await reader.read())) == 12
        writer.close()


class Pipe(asyncio.Transport):
    """Reads as many bytes as the test allows."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.waiting = 0
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.abort()

    def is_given_up(self) -> bool:
        return self.aborted


async def test_a_client_that_takes_a_little_is_not_given_up() -> None:
    async with serving(limits=Limits(stall_s=10.0, idle_s=1e9)) as (_, server):
        connection, pipe = ClientConnection(server), Pipe()
        connection.connection_made(pipe)
        now_s = server.loop.time()
        for i in range(20):
            connection.write(b"x" * 1000)
            pipe.waiting -= 10
            connection.check_time(now_s + 9.0 * i)
        assert not pipe.is_given_up()
        connection.check_time(now_s + 9.0 * 19 + 10.1)
        assert pipe.is_given_up()
        connection.connection_lost(None)


async def test_leave_to_go_on_is_not_given_in_the_midst_of_an_answer() -> None:
    gate = asyncio.Event()

    async def stream(request: Request) -> None:
        request.start(200, TEXT, b"abc")
        await gate.wait()
        request.end()

    async with serving(stream) as (_, server):
        connection, pipe = ClientConnection(server), Pipe()
        connection.connection_made(pipe)
        connection.data_received(post(b""))
        await asyncio.sleep(0)  # the handler begins
        connection.data_received(post(b"body", b"Expect: 100-continue"))
        gate.set()
        while connection.task is not None:
            await connection.task
        assert pipe.data.count(b"3\r\nabc\r\n0\r\n\r\n") == 2
        connection.connection_lost(None)


async def test_other_paths_are_the_applications() -> None:
    async def answer(request: web.Request) -> web.Response:
        head = f"{request.method} {request.query['a']} {request.headers['X']} "
        return web.Response(body=head.encode() + await request.read())

    app = web.Application()
    app.router.add_post("/other", answer)
    other = post(b"body", b"X: y", path=b"/other?a=b")
    async with serving(app=app) as (port, server):
        first, second = bodies(await say(port, post(b"one") + other + post(b"never answered")))
        assert not server.connections
    assert (first, second) == (b"one", b"POST b y body")


async def test_one_connection_too_many_is_answered_and_closed() -> None:
    async with serving(limits=Limits(connections=1)) as (port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"first"))
        await until(lambda: len(server.connections) == 1)
        answer = await say(port)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert bodies(answer) == [b"there are 1 connections already"]
        writer.close()
        await until(lambda: not server.connections)
        assert bodies(await say(port, post(b"next", LAST))) == [b"next"]


async def test_requests_sent_ahead_wait_at_the_client() -> None:
    """Sixteen of any size would be a gigabyte for each connection."""
    gate, size, count = asyncio.Event(), 700_000, 10

    async def slow(request: Request) -> None:
        await gate.wait()
        request.respond(200, b"%d" % len(request.body), TEXT)

    async with serving(slow) as (port, server):
        last = post(b"x" * size, LAST)
        asked = asyncio.create_task(say(port, *[post(b"x" * size)] * (count - 1), last))
        await until(lambda: any(one._paused for one in server.connections))
        (connection,) = server.connections
        assert len(connection._ready) == 2
        gate.set()
        assert bodies(await asked) == [b"%d" % size] * count


async def test_a_handler_that_fails_costs_its_connection_only() -> None:
    async def bug(request: Request) -> None:
        raise ValueError("a bug")

    async with serving(bug) as (port, server):
        assert await say(port, post(b"")) == b""
        assert not server.connections
