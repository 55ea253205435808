"""The token path's own HTTP server: requests read, answers written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest

from router.wire.reading import Limits
from router.wire.request import Refusal, Request

from .bytewise import CHUNKED, HOST, LAST, TEXT, bodies, echo, post, say, serving


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /echo HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (post(b"abc", b"Content-Length: 3"), 400),
        (post(b"abc", b"Content-Length: 4"), 400),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),  # both lengths
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: gzip\r\n\r\n" % HOST, 501),
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: xchunked\r\n\r\n" % HOST, 501),
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
        (b"POST /echo HTTP/1.1\r\n%bTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" % HOST, 501),
        (b"GET  /echo HTTP/1.1\r\n%b\r\n" % HOST, 400),
        (b"GET /echo  HTTP/1.1\r\n%b\r\n" % HOST, 400),
        (b"GET /echo HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\n%b%b\r\n" % (HOST, b"X: y\r\n" * 256), 431),
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
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
    assert b"Connection: close" in answer


async def test_a_request_may_come_in_any_pieces() -> None:
    head = b"POST /echo?a=b HTTP/1.1\r\n%b%b\r\n%b\r\n\r\n" % (HOST, CHUNKED, LAST)
    whole = head + b"2;ext=1\r\nab\r\n3\r\ncde\r\n0\r\nTrailer: x\r\n\r\n"
    async with serving() as (port, _):
        answer = await say(port, *(whole[i : i + 1] for i in range(len(whole))))
    assert bodies(answer) == [b"abcde"]


@pytest.mark.parametrize("framing", [b"Content-Length: 100000", CHUNKED])
async def test_a_large_body_is_not_read_before_its_sender_is_authenticated(framing: bytes) -> None:
    def screen(path: str, headers: Mapping[str, str]) -> Refusal | None:
        assert path == "/echo"
        return None if headers.get("authorization") == "Bearer k" else Refusal(401, "who are you?")

    async with serving(screen=screen) as (port, _):
        head = b"POST /echo HTTP/1.1\r\n%b%b\r\n" % (HOST, framing)
        answer = await say(port, head + b"\r\n")  # and no body
        assert (bodies(answer), b" 401 " in answer) == ([b"who are you?"], True)
        known = head + b"Authorization: Bearer k\r\n%b\r\n\r\n" % LAST
        body = b"x" * 100_000
        if framing is CHUNKED:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert bodies(await say(port, known, body)) == [b"x" * 100_000]
        assert bodies(await say(port, post(b"small", LAST))) == [b"small"]  # who serves it asks


async def test_a_request_is_refused_once() -> None:
    asked: list[str] = []

    def screen(path: str, headers: Mapping[str, str]) -> Refusal | None:
        asked.append(path)
        return Refusal(401, "who are you?")

    raw = b"POST /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 100000\r\n\r\n"
    async with serving(screen=screen) as (port, _):
        assert bodies(await say(port, raw)) == [b"host is given twice"]
    assert not asked


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


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_an_offered_upgrade_is_ignored(size: int) -> None:
    """As ``curl --http2`` and Java's HttpClient offer it; the connection is used again."""
    chunked = b"4\r\nbody\r\n0\r\n\r\n"
    get = b"GET /echo HTTP/1.1\r\n%b%b\r\n\r\n" % (HOST, b"\r\n".join(UPGRADE))
    raw = (
        post(b"abc", *UPGRADE)
        + b"POST /echo HTTP/1.1\r\n%b%b\r\n%b\r\n\r\n%b"
        % (HOST, b"\r\n".join(UPGRADE), CHUNKED, chunked)
        + get
        + post(b"last", LAST)
    )
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    async with serving() as (port, _):
        assert bodies(await say(port, *pieces)) == [b"abc", b"body", b"nothing", b"last"]


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


async def test_the_next_head_is_not_charged_with_the_body_before_it() -> None:
    first, second = b"x" * 200_000, b"y"
    whole, later = post(first), post(second, LAST)
    async with serving() as (port, _):
        answer = await say(port, whole + later[:10], later[10:])
    assert bodies(answer) == [first, second]


async def test_an_answer_to_head_has_no_body() -> None:
    head = b"HEAD /echo HTTP/1.1\r\n%b%b\r\n\r\n" % (HOST, LAST)
    async with serving() as (port, _):
        assert (await say(port, head)).endswith(b"Content-Length: 7\r\nConnection: close\r\n\r\n")


async def test_a_target_may_name_the_server() -> None:
    async with serving() as (port, _):
        assert bodies(await say(port, post(b"a", LAST, path=b"http://router/echo"))) == [b"a"]
