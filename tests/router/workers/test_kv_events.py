"""KV events over real ZeroMQ sockets: turns whose KV is evicted are not sent to their home."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from eval.fake_worker.worker import FakeWorker

from ..conftest import Client, Cluster
from ..fixtures import until
from ..scripts import answering

TOKENS = 96  # of the prompt, cached whole


@dataclass(slots=True)
class FakePublisher:
    """A fake of SGLang's publisher of KV events."""

    socket: zmq.asyncio.Socket
    port: int
    numbers: count[int] = field(default_factory=count)

    async def subscribed(self) -> None:
        """Wait for a subscription."""
        assert (await self.socket.recv())[:1] == b"\1"

    async def unsubscribed(self) -> None:
        """Wait for the end of a subscription."""
        assert (await self.socket.recv())[:1] == b"\0"

    async def send(self, *events: dict[str, Any], number: int | None = None) -> None:
        payload = msgspec.msgpack.encode([1.0, events])
        await self.send_bytes(payload, next(self.numbers) if number is None else number)

    async def send_bytes(self, payload: bytes, number: int) -> None:
        await self.send_frames(b"", number.to_bytes(8, "big"), payload)

    async def send_frames(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)


@asynccontextmanager
async def publisher(port: int = 0) -> AsyncIterator[FakePublisher]:
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        yield FakePublisher(socket, int(bound.rsplit(":", 1)[1]))


def kv_events_info(port: int, **others: object) -> dict[str, object]:
    return {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": port,
        "topic": "",
        "block_size": 16,
        "dp_size": 1,
        **others,
    }


def stored(
    session: str | None, *blocks: int, parent: int | None = None, **others: object
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": parent,
        "token_ids": [1] * 16 * len(blocks),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **({} if session is None else {"session_id": session}),
        **others,
    }


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU"}


BLOCKS = (-5, 2**62, 3, 4, 5, 6)


def workers(port: int, **others: object) -> tuple[FakeWorker, FakeWorker]:
    events = kv_events_info(port, **others)
    decode = FakeWorker("decode", answering(prompt=100, cached=TOKENS), kv_events=events)
    return FakeWorker("prefill", answering()), decode


FirstTurn = tuple[FakePublisher, Client, FakeWorker, FakeWorker, str]


@asynccontextmanager
async def first_turn_served(cluster: Cluster) -> AsyncIterator[FirstTurn]:
    """A router with a subscription to a decode worker, after one turn of a conversation."""
    async with publisher() as events:
        p, d = workers(events.port)
        async with cluster(p, d) as client:
            await events.subscribed()
            await client.chat("hello")
            session = d.bodies[0]["session_id"]
            assert p.bodies[0]["session_id"] == session
            yield events, client, p, d, session


async def connected_is(client: Client, worker: FakeWorker, connected: bool = True) -> None:
    labels = {"role": worker.role, "worker": worker.url}

    async def holds() -> bool:
        return await client.metric("ppd_kv_events_connected", **labels) == connected

    await until(holds)


async def counter_is(client: Client, name: str, worker: FakeWorker, value: float) -> None:
    labels = {"role": worker.role, "worker": worker.url}

    async def holds() -> bool:
        return await client.metric(name, **labels) == value

    await until(holds)


async def test_turns_with_evicted_kv_are_remote(cluster: Cluster) -> None:
    async with first_turn_served(cluster) as (events, client, p, d, session):
        await events.send(stored(session, *BLOCKS), stored(None, 77), stored("a client's", 78))
        await events.send(removed(77, 6))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, 16)
        # A page of 6 is missing, and the precondition names four of them.
        second = await client.chat("hello", "www", "and")
        assert second.route == ("local", "policy_full")
        assert d.bodies[1]["session_id"] == session
        await events.send(removed(78, *BLOCKS[:5]))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, TOKENS)
        third = await client.chat("hello", "www", "and", "www", "so")
        assert third.route == ("remote", "evicted")
        assert len(d.bodies) == len(p.bodies) + 1 == 3, "no request was sent to it first"
        fourth = await client.chat("hello", "www", "and", "www", "so", "www", "now")
        assert fourth.route[0] == "local", "the served turn counts without its events"
        await events.send({"type": "AllBlocksCleared"}, stored(session, *BLOCKS, 7, 8))
        await events.send(stored("1", 9), removed(9))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, TOKENS + 16)
        fifth = await client.chat("hello", "www", "and", "www", "so", "www", "!")
        assert fifth.route[0] == "local"
        await events.send({"type": "AllBlocksCleared"}, stored("1", 9), removed(9))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, TOKENS + 32)
        last = await client.chat("hello", "www", "and", "www", "so", "www", "and so")
        assert last.route == ("remote", "evicted")


async def test_prompts_and_native_requests_get_a_session_id_and_a_clients_own_is_removed(
    cluster: Cluster,
) -> None:
    async with publisher() as events:
        p, d = workers(events.port)
        async with cluster(p, d) as client:
            await events.subscribed()
            mine = {"model": "fake", "prompt": "so " * 99, "session_id": "theirs"}
            await client.post("/v1/completions", mine)
            native = {"text": "no " * 99, "sampling_params": {}}
            await client.post("/generate", native)
            await client.post("/v1/completions", {"model": "fake", "prompt": ["a", "b"]})
    names = [body.get("session_id") for body in d.bodies]
    assert len(set(names[:2])) == 2
    assert all(name is not None and len(name) == 12 for name in names[:2])
    assert names[2] is None, "several prompts have no conversation"


@pytest.mark.parametrize(
    ("number", "payload"),
    [
        (5, msgspec.msgpack.encode([1.0, []])),  # 1 was next
        (1, b"no msgpack"),
        (1, msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]])),
        (1, msgspec.msgpack.encode([1.0, [removed("six")]])),  # type: ignore[arg-type]
        (1, msgspec.msgpack.encode([1.0, [stored("1", 2**63)]])),
        (1, msgspec.msgpack.encode([1.0, [stored("1", 9, block_size=-16)]])),
        (1, msgspec.msgpack.encode([1.0, [stored("ab", 9)]]).replace(b"ab", b"\xff\xff")),
        (1, msgspec.msgpack.encode([1.0, [removed()]]).replace(b"\x90", b"\x91" * 9999 + b"\1")),
        (0, None),  # a message of one frame, before the next one
    ],
)
async def test_missed_events_drop_all_records_and_are_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, number: int, payload: bytes | None
) -> None:
    async with first_turn_served(cluster) as (events, client, _, d, session):
        await events.send(stored(session, *BLOCKS), removed(*BLOCKS))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, TOKENS)
        if payload is None:
            await events.send_frames(b"hello")
        else:
            await events.send_bytes(payload, number)
        await counter_is(client, "ppd_kv_events_missed_total", d, 1)
        assert (await client.chat("hello", "www", "and")).route[0] == "local"
        await events.send_bytes(b"worse", number + 1)
        await counter_is(client, "ppd_kv_events_missed_total", d, 2)
        assert caplog.text.count("were missed") == 1
        await events.send(stored("1", 9), removed(9), number=number + 2)
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, TOKENS + 16)
        await events.send_bytes(b"bad again", number + 3)
        await counter_is(client, "ppd_kv_events_missed_total", d, 3)
        assert caplog.text.count("were missed") == 2


async def test_a_worker_with_a_lower_tier_is_not_followed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with first_turn_served(cluster) as (events, client, _, d, session):
        await events.send(stored(session, *BLOCKS))
        await events.send(stored(None, 6, medium="CPU_PINNED"))
        await events.unsubscribed()
        assert (await client.chat("hello", "www", "and")).route[0] == "local"
        assert caplog.text.count("keeps KV in CPU_PINNED, too") == 1
        assert "session_id" not in d.bodies[1]


async def test_reasoning_that_is_not_sent_back_does_not_count_as_evicted(cluster: Cluster) -> None:
    async with first_turn_served(cluster) as (events, client, _, d, session):
        await events.send(stored(session, *BLOCKS, 20, 21, 22, 23))
        await events.send(stored(session, 30, parent=BLOCKS[-1]), removed(20, 21, 22, 23))
        await events.send(stored("1", 9), removed(9))
        await counter_is(client, "ppd_kv_evicted_tokens_total", d, 16)
        assert (await client.chat("hello", "www", "and")).route[0] == "local"


async def test_a_publisher_that_stops_is_logged_and_reconnected(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with publisher() as events:
        port = events.port
        p, d = workers(port)
        async with cluster(p, d) as client:
            await events.subscribed()
            await connected_is(client, d)
            events.socket.close()
            await connected_is(client, d, connected=False)
            assert caplog.text.count(f"the KV events of {d.url} have stopped") == 1
            assert await client.metric("ppd_fallback", kind="kv_events_stopped") == 1
            assert (await client.chat("hello")).status == 200
            async with publisher(port) as again:
                await again.subscribed()
                await connected_is(client, d)
                assert await client.metric("ppd_fallback", kind="kv_events_stopped") == 0
                await again.send(stored("1", 9), removed(9))
                await counter_is(client, "ppd_kv_evicted_tokens_total", d, 16)


async def test_workers_that_join_later_or_again_are_subscribed_to(cluster: Cluster) -> None:
    async with publisher() as events, publisher() as others:
        p, d = workers(events.port)
        _, late = workers(others.port)
        async with cluster(p, d) as client, late.serving():
            await events.subscribed()
            async with client.http.put(
                f"{client.url}/workers", json={"url": late.url, "role": "decode"}
            ) as answer:
                assert answer.status < 300, await answer.text()
            await others.subscribed()
            async with client.http.delete(
                f"{client.url}/workers/{late.url.removeprefix('http://')}"
            ) as answer:
                assert answer.status < 300, await answer.text()
            await others.unsubscribed()
            open_now = []
            for _ in range(3):
                d.ready = False
                await alive_is(client, d, alive=False)
                d.ready = True
                received = {(await events.socket.recv())[:1] for _ in range(2)}
                assert received == {b"\0", b"\1"}, "one new subscription"
                await connected_is(client, d)
                open_now.append(_open_eventfds())
            assert open_now[0] == open_now[-1], "earlier sockets are closed"


def _open_eventfds() -> int:
    """The number of open eventfds; ZeroMQ has one for each socket."""

    def kind(descriptor: Path) -> str:
        try:
            return str(descriptor.readlink())
        except FileNotFoundError:  # that of the listing itself
            return ""

    return sum("eventfd" in kind(descriptor) for descriptor in Path("/proc/self/fd").iterdir())


async def alive_is(client: Client, worker: FakeWorker, *, alive: bool) -> None:
    async def holds() -> bool:
        return bool((await client.workers())[worker.url]["alive"]) == alive

    await until(holds)


@pytest.mark.parametrize(
    ("others", "keeps_sessions", "options", "log_text"),
    [
        ({"dp_size": 2}, False, {}, "publishes the KV events of 2 caches and has 1"),
        ({}, True, {}, ""),
        ({"publisher": "null"}, False, {}, ""),
        ({"endpoint_host": "10.0.0.1"}, False, {}, "it must bind to *, not to 10.0.0.1"),
        ({"dp_size": None}, False, {}, "cannot subscribe to the KV events of"),
        ({}, False, {"kv_events": False}, ""),
    ],
)
async def test_without_a_subscription_requests_get_no_session_id(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    others: dict[str, object],
    keeps_sessions: bool,
    options: dict[str, Any],
    log_text: str,
) -> None:
    p, d = workers(1, **others)
    d.keeps_sessions = keeps_sessions
    async with cluster(p, d, **options) as client:
        await client.chat("hello")
        assert "session_id" not in d.bodies[0]
    assert log_text in caplog.text


async def test_workers_that_keep_sessions_and_beam_search_get_no_session_id(
    cluster: Cluster,
) -> None:
    async with publisher() as events:
        p, d = workers(events.port)
        p.keeps_sessions = True
        r = FakeWorker("null", answering(), kv_events=kv_events_info(events.port))
        async with cluster(p, d) as client:
            await events.subscribed()
            await client.chat("hello")
        assert "session_id" not in d.bodies[0]
        await events.unsubscribed()
        async with cluster(r, policy="replica") as client:
            await events.subscribed()
            await client.chat("hello")
            beams = {"text": "so " * 99, "sampling_params": {"beam_width": 2}}
            await client.post("/generate", beams)
        assert ["session_id" in body for body in r.bodies] == [True, False]


async def test_a_publisher_that_never_answers_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.kv_events._CONNECT_WARNING_S", 0.01)
    p, d = workers(1)
    async with cluster(p, d) as client:

        async def is_logged() -> bool:
            assert (await client.chat("hello")).status == 200
            return "nothing answers at tcp://127.0.0.1:1" in caplog.text

        await until(is_logged)


async def test_without_the_library_the_log_names_the_package(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq.asyncio", None)
    p, d = workers(1)
    async with cluster(p, d) as client:
        assert (await client.chat("hello")).status == 200
    assert "pip install '.[kv-events]' in a checkout of sglang-ppd" in caplog.text
