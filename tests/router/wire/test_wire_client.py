"""The token path's own HTTP client, answered byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from router.wire import client as wire_client
from router.wire.client import Upstreams
from router.wire.errors import ConnectError

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Collected:
    """A ``ResponseListener`` that records its calls."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""
        self.begun = asyncio.Event()
        self.end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def body(self, data: bytes) -> None:
        self.data += data
        self.begun.set()

    def ended(self) -> None:
        self.end.set_result(None)

    def failed(self, error: Exception) -> None:
        self.end.set_result(error)


class Server:
    """Reads a request, then does as ``answering`` says, on each connection."""

    def __init__(self, answering: Answering) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self._answering = answering

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                await self._answering(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def between(
    answering: Answering, idle_s: float = 5.0
) -> AsyncIterator[tuple[Server, Upstreams]]:
    server = Server(answering)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    server.url = f"http://{host}:{port}"
    upstreams = Upstreams(connect_s=5.0, answer_s=idle_s, idle_s=idle_s, reuse_s=60.0)
    try:
        yield server, upstreams
    finally:
        await upstreams.close()
        listening.close()


async def ask(server: Server, upstreams: Upstreams) -> Collected:
    """Ask, and wait for the end."""
    collected = Collected()
    upstreams.post(server.url, "/path", {"X-Request-Id": "7"}, b"{}", collected)
    await collected.end
    return collected


def always(*pieces: bytes) -> Answering:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def then_close(*pieces: bytes) -> Answering:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await always(*pieces)(reader, writer)
        raise ConnectionError

    return answer


async def test_what_is_sent() -> None:
    async with between(always(WHOLE)) as (server, upstreams):
        got = await ask(server, upstreams)
        assert (got.status, got.data, got.end.result()) == (200, b"ok", None)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /path HTTP/1.1"
    assert set(lines[1:]) == {
        b"Host: " + server.url.removeprefix("http://").encode(),
        b"Content-Type: application/json",
        b"Content-Length: 2",
        b"X-Request-Id: 7",
    }
    assert body == b"{}"


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (WHOLE, 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 1),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nok", 1),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nok", 2),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 2),
    ],
)
async def test_a_connection_is_kept_unless_something_forbids_it(
    answer: bytes, connections: int
) -> None:
    for pieces in ((answer,), [answer[i : i + 1] for i in range(len(answer))]):
        async with between(always(*pieces)) as (server, upstreams):
            for _ in range(2):
                got = await ask(server, upstreams)
                assert (got.data, got.end.result()) == (b"ok", None)
            assert server.connections == connections


async def test_what_comes_unasked_behind_an_answer_is_no_answer() -> None:
    async with between(always(WHOLE + WHOLE)) as (server, upstreams):
        for _ in range(2):
            assert (await ask(server, upstreams)).data == b"ok"
        assert server.connections == 2


async def test_an_answer_without_length_ends_with_the_connection() -> None:
    async with between(then_close(b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it")) as (server, upstreams):
        got = await ask(server, upstreams)
    assert (got.data, got.end.result()) == (b"all of it", None)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_has_failed(begun: bytes) -> None:
    async with between(then_close(begun)) as (server, upstreams):
        got = await ask(server, upstreams)
    assert isinstance(got.end.result(), ConnectionError)


async def test_nobody_there() -> None:
    async with between(always(WHOLE)) as (server, upstreams):
        server.url = "http://127.0.0.1:1"
        got = await ask(server, upstreams)
    assert isinstance(got.end.result(), ConnectError)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    raise ConnectionError


async def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "_SWEEP_S", 0.01)
    async with between(silent, idle_s=0.05) as (server, upstreams):
        got = await ask(server, upstreams)
    assert isinstance(got.end.result(), TimeoutError)


async def test_who_gives_up_closes_the_connection() -> None:
    hung_up = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.read()
        hung_up.set()
        raise ConnectionError

    async with between(stream) as (server, upstreams):
        collected = Collected()
        exchange = upstreams.post(server.url, "/", {}, b"{}", collected)
        await collected.begun.wait()
        exchange.close()
        await hung_up.wait()
        assert not collected.end.done()


async def test_who_is_held_back_reads_no_further() -> None:
    size, full = 32 * 1024 * 1024, asyncio.Event()

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _i in range(size // 65_536):
            writer.write(b"x" * 65_536)
            if writer.transport.get_write_buffer_size() > 1024 * 1024:
                full.set()
        await writer.drain()

    async with between(flood) as (server, upstreams):
        collected = Collected()
        exchange = upstreams.post(server.url, "/", {}, b"{}", collected)
        exchange.pause_reading()
        await full.wait()
        before = len(collected.data)
        exchange.resume_reading()
        assert await collected.end is None
    assert before == 0
    assert len(collected.data) == size


async def test_a_connection_paused_to_the_end_of_an_answer_is_read_again() -> None:
    class Slow(Collected):
        def body(self, data: bytes) -> None:
            super().body(data)
            exchange.pause_reading()

    async with between(always(WHOLE)) as (server, upstreams):
        slow = Slow()
        exchange = upstreams.post(server.url, "/", {}, b"{}", slow)
        assert await slow.end is None
        exchange.resume_reading()  # too late
        assert (await ask(server, upstreams)).data == b"ok"
        assert server.connections == 1
