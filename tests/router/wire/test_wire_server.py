"""The token path's own HTTP server, spoken to byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import AF_INET, IPPROTO_TCP, SOCK_STREAM, socket, socketpair

import pytest
from aiohttp import web

from router.wire import server as wire_server
from router.wire.connection import ClientConnection
from router.wire.reading import Limits
from router.wire.request import Request
from router.wire.server import Handler, WireServer

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
    handler: Handler = echo, limits: Limits | None = None, app: web.Application | None = None
) -> AsyncIterator[tuple[int, WireServer]]:
    runner = web.AppRunner(app or web.Application(), handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=("/echo",),
        handler=handler,
        elsewhere=runner.server,
        refuse=lambda refusal: refusal.message.encode(),
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
    """All that comes back until the server closes; each piece is sent by itself."""
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
    """Of answers with a Content-Length, one after the other."""
    found: list[bytes] = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(answers[:size])
        answers = answers[size:]
    return found


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /echo HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (post(b"abc", b"Content-Length: 3"), 400),
        (post(b"abc", b"Content-Length: 4"), 400),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),  # both lengths
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: gzip\r\n\r\n" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: xchunked\r\n\r\n" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: chunked, identity\r\n\r\n" % HOST, 400),
        (b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\n%bContent-Length : 3\r\n\r\nabc" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bContent-Length: +3\r\n\r\nabc" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bContent-Length: 3, 3\r\n\r\nabc" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n-1\r\n" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n1\na\n0\n\n" % HOST, 400),
        (b"POST /echo HTTP/1.1\nHost: a\n\n", 400),
        (b"POST /echo HTTP/1.1\r\n%bX: a\r\n folded\r\n\r\n" % HOST, 400),
        (b"POST /echo HTTP/1.1\r\n%bX: a\0b\r\n\r\n" % HOST, 400),
        (post(b"abc", b"Connection: upgrade", b"Upgrade: h2c"), 400),
        (b"CONNECT router:1 HTTP/1.1\r\n%b\r\n" % HOST, 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /echo HTTP/2.0\r\n%b\r\n" % HOST, 505),
        (b"GET /echo\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),  # TLS
        (post(b"", b"Authorization: a", b"Authorization: b"), 400),
        (post(b"x", b"Content-Encoding: gzip"), 415),
    ],
)
async def test_what_is_no_plain_request_is_refused_and_the_connection_closed(
    raw: bytes, status: int
) -> None:
    async def never(request: Request) -> None:
        raise AssertionError(request)

    async with serving(never) as (port, _):
        answer = await say(port, raw)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"Connection: close" in answer


async def test_a_request_may_come_in_any_pieces() -> None:
    head = b"POST /echo?a=b HTTP/1.1\r\n%b%b\r\n%b\r\n\r\n" % (HOST, CHUNKED, LAST)
    whole = head + b"2;ext=1\r\nab\r\n3\r\ncde\r\n0\r\nTrailer: x\r\n\r\n"
    async with serving() as (port, _):
        answer = await say(port, *(whole[i : i + 1] for i in range(len(whole))))
    assert bodies(answer) == [b"abcde"]


async def test_pipelined_requests_are_answered_in_order() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()
    order: list[bytes] = []

    async def slow_first(request: Request) -> None:
        order.append(request.body)
        begun.set()
        if request.body == b"one":
            await gate.wait()
        await echo(request)

    async with serving(slow_first) as (port, _):
        asked = asyncio.create_task(say(port, post(b"one") + post(b"two") + post(b"three", LAST)))
        await begun.wait()
        gate.set()
        assert bodies(await asked) == [b"one", b"two", b"three"]
    assert order == [b"one", b"two", b"three"]


async def test_an_upgrade_is_not_taken_up_and_the_request_answered() -> None:
    head = b"GET /echo HTTP/1.1\r\n%bConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" % HOST
    async with serving() as (port, _):
        assert bodies(await say(port, head + post(b"HTTP/2 it is not"))) == [b"nothing"]


async def test_what_follows_a_good_request_is_refused_after_its_answer() -> None:
    async with serving() as (port, _):
        answer = await say(port, post(b"good") + b"POST /echo HTTP/1.1\r\n\r\n")
    first, second = bodies(answer)
    assert (first, second) == (b"good", b"the Host header is missing")


@pytest.mark.parametrize("keep", [True, False])
async def test_http_1_0_keeps_the_connection_only_if_asked(keep: bool) -> None:
    first = post(b"one", *([b"Connection: keep-alive"] if keep else []), version=b"1.0")
    async with serving() as (port, _):
        if keep:
            answer = await say(port, first, post(b"two", version=b"1.0"))
            assert bodies(answer) == [b"one", b"two"]
        else:
            assert bodies(await say(port, first)) == [b"one"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream(version: bytes) -> None:
    async def stream(request: Request) -> None:
        request.start(200, TEXT, b"first")
        request.write(b"second")
        request.end()

    async with serving(stream) as (port, _):
        answer = await say(port, post(b"", LAST, version=version))
    head, _, body = answer.partition(b"\r\n\r\n")
    if version == b"1.0":
        assert body == b"firstsecond"
        assert b"Transfer-Encoding" not in head
    else:
        assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


async def test_a_stream_that_is_aborted_does_not_end_well() -> None:
    async def broken(request: Request) -> None:
        request.start(200, TEXT, b"first")
        request.abort()

    async with serving(broken) as (port, _):
        assert (await say(port, post(b""))).endswith(b"5\r\nfirst\r\n")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused_while_it_is_sent(declared: bool) -> None:
    """The client reads the answer, although it has not sent all."""
    head = b"POST /echo HTTP/1.1\r\n" + HOST
    head += (b"Content-Length: 9000000" if declared else CHUNKED) + b"\r\n\r\n"
    piece = b"10000\r\n%b\r\n" % (b"x" * 0x10000)
    async with serving(limits=Limits(body_bytes=100_000)) as (port, _):
        answer = await say(port, head, *[piece] * 20)
    assert answer.startswith(b"HTTP/1.1 413 "), answer


@pytest.mark.parametrize(
    "line", [b"X: " + b"a" * 70_000, b"".join(b"X-%d: a\r\n" % i for i in range(9000))]
)
async def test_a_head_that_does_not_end_is_refused(line: bytes) -> None:
    async with serving() as (port, _):
        answer = await say(port, b"POST /echo HTTP/1.1\r\n", *[line] * 3)
    assert answer.startswith(b"HTTP/1.1 431 "), answer


async def test_a_client_that_expects_leave_to_go_on_gets_it() -> None:
    async with serving() as (port, _):
        answer = await say(port, post(b"body", b"Expect: 100-continue", LAST))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


async def test_a_head_in_two_reads_is_not_charged_with_its_body() -> None:
    whole = post(b"x" * 150_000, b"X: " + b"a" * 30_000, LAST)
    async with serving() as (port, _):
        assert bodies(await say(port, whole[:1000], whole[1000:])) == [b"x" * 150_000]


@pytest.mark.parametrize("rest", [b"0\r\nX: " + b"y" * 300_000, b"1\r\nx\r\n" * 100_000])
async def test_a_body_of_little_but_framing_is_refused(rest: bytes) -> None:
    async with serving() as (port, _):
        answer = await say(port, b"POST /echo HTTP/1.1\r\n%b%b\r\n\r\n" % (HOST, CHUNKED), rest)
    assert answer.startswith(b"HTTP/1.1 400 "), answer


async def test_a_read_may_end_one_body_and_begin_another() -> None:
    first, second = b"x" * 300_000, b"y" * 20_000
    whole = post(first) + post(second, LAST)
    async with serving() as (port, _):
        answer = await say(port, whole[:250_000], whole[250_000:310_000], whole[310_000:])
    assert bodies(answer) == [first, second]


async def test_an_answer_to_head_has_no_body() -> None:
    head = b"HEAD /echo HTTP/1.1\r\n%b%b\r\n\r\n" % (HOST, LAST)
    async with serving() as (port, _):
        assert (await say(port, head)).endswith(b"Content-Length: 7\r\nConnection: close\r\n\r\n")


async def test_a_target_may_name_the_server() -> None:
    async with serving() as (port, _):
        assert bodies(await say(port, post(b"a", LAST, path=b"http://router/echo"))) == [b"a"]


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

    async def pour(self, request: Request) -> None:
        request.connection.heed(self)
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
    """Takes as much as it is told to."""

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
        told = f"{request.method} {request.query['a']} {request.headers['X']} "
        return web.Response(body=told.encode() + await request.read())

    app = web.Application()
    app.router.add_post("/other", answer)
    other = post(b"body", b"X: y", path=b"/other?a=b")
    async with serving(app=app) as (port, server):
        first, second = bodies(await say(port, post(b"one") + other + post(b"never answered")))
        assert not server.connections
    assert (first, second) == (b"one", b"POST b y body")


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


async def test_a_handler_that_fails_costs_its_connection_only() -> None:
    async def bug(request: Request) -> None:
        raise ValueError("a bug")

    async with serving(bug) as (port, server):
        assert await say(port, post(b"")) == b""
        assert not server.connections
