"""Workers and clients that fail, one cell of the fault table a test."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ppd.decision import Decision, Features, Policy
from ppd.score import Objective
from router.serving.ledger import Ledger

from ..conftest import Client, Cluster
from ..fake_engine import (
    DONE,
    FakeEngine,
    Script,
    answering,
    ending_early,
    event,
    failing,
    hanging,
    resetting,
    start_stream,
    stoppable,
    streaming_forever,
    token,
)

REMOTE = {"endpoint": "/v1/chat/completions", "route": "remote", "reason": "first_turn"}


def workers(prefill: Script, decode: Script) -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("prefill", prefill), FakeEngine("decode", decode)


@pytest.mark.parametrize("route", ["remote", "local"])
@pytest.mark.parametrize("fault", [resetting, ending_early])
async def test_a_truncated_stream_ends_with_one_error_event(
    cluster: Cluster, fault: Script, route: str
) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        contents = ["hello"]
        if route == "local":
            await client.chat(*contents)
            contents += ["www", "and"]
        d.script = fault
        reply = await client.chat(*contents, stream=True)
        assert reply.route[0] == route
        assert [("error" in event) for event in reply.events].count(True) == 1
        assert reply.events[-1]["error"]["code"] == 502
        labels = {"endpoint": "/v1/chat/completions", "outcome": "truncated"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_decode_stream_is_not_held_back_by_a_hanging_prefill(cluster: Cluster) -> None:
    p, d = workers(hanging, answering())
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), 5.0)
        assert reply.status == 200
        assert len(reply.events) == 3
        await asyncio.wait_for(p.hung_up.wait(), 5.0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "kind"), [(500, "x"), (400, "invalid_request_error")])
async def test_a_failed_prefill_is_told_and_ends_the_decode_leg(
    cluster: Cluster, stream: bool, status: int, kind: str
) -> None:
    p, d = workers(failing(status, "no prefill for you"), hanging)
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=stream), 5.0)
        assert reply.status == status
        assert reply.json["error"]["message"] == "no prefill for you"
        assert reply.json["error"]["type"] == kind
        await asyncio.wait_for(d.hung_up.wait(), 5.0)
        assert await client.metric("ppd_prefill_errors_total") == (status >= 500)


async def test_a_failed_decode_is_told_and_ends_the_prefill_leg(cluster: Cluster) -> None:
    p, d = workers(hanging, failing(500, "no room"))
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), 5.0)
        assert (reply.status, reply.json["error"]["message"]) == (500, "no room")
        await asyncio.wait_for(p.hung_up.wait(), 5.0)


async def hang_up(client: Client, body: dict[str, Any], when: asyncio.Event) -> None:
    """Send a request and close the connection once ``when`` is set."""
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(
            http.post(f"{client.url}/v1/chat/completions", json=body).__aenter__()
        )
        await asyncio.wait_for(when.wait(), 5.0)
        if task.done():
            task.result().close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_early_reaches_both_legs(
    cluster: Cluster, stream: bool
) -> None:
    p, d = workers(hanging, hanging)
    async with cluster(p, d) as client:
        message = {"role": "user", "content": "hello"}
        both = asyncio.Event()

        async def both_arrived() -> None:
            await asyncio.gather(p.arrived.wait(), d.arrived.wait())
            both.set()

        watch = asyncio.create_task(both_arrived())
        await hang_up(client, {"model": "fake", "messages": [message], "stream": stream}, both)
        await watch
        await asyncio.wait_for(asyncio.gather(p.hung_up.wait(), d.hung_up.wait()), 5.0)
        assert await in_flight(client, p, d) == 0
        labels = {"endpoint": "/v1/chat/completions", "outcome": "disconnected"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_client_that_hangs_up_in_mid_stream_reaches_the_decode_leg(
    cluster: Cluster,
) -> None:
    p, d = workers(answering(), streaming_forever)
    async with cluster(p, d) as client, aiohttp.ClientSession() as http:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
        }
        response = await http.post(f"{client.url}/v1/chat/completions", json=body)
        await response.content.readany()
        response.close()
        await asyncio.wait_for(d.hung_up.wait(), 5.0)
        assert await in_flight(client, p, d) == 0


async def in_flight(client: Client, *engines: FakeEngine) -> float:
    return sum(
        [await client.metric("ppd_worker_in_flight", role=e.role, worker=e.url) for e in engines]
    )


async def test_a_dead_decode_worker_is_passed_over(cluster: Cluster) -> None:
    p, d = workers(answering(), answering())
    gone = FakeEngine("decode", answering())
    async with gone.serving():
        serving = cluster(p, gone, d, probe_interval_s=60.0)
        client = await serving.__aenter__()
    try:  # ``gone`` has stopped; the router does not know yet
        for i in range(30):  # one of them would go there
            assert (await client.chat(f"{i}")).status == 200
        assert await client.metric("ppd_worker_alive", role="decode", worker=gone.url) == 0
    finally:
        await serving.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("boot_id", "route"),
    [("mine", ("local", "policy_full")), ("other", ("remote", "home_gone"))],
    ids=["same-process", "restarted"],
)
async def test_only_a_restarted_home_has_lost_its_conversations(
    cluster: Cluster, boot_id: str, route: tuple[str, str]
) -> None:
    p, d = workers(answering(), answering())
    d.boot_id = "mine"
    async with cluster(p, d) as client:
        await client.chat("hello")
        d.ready = False
        await until_alive(client, d, 0.0)
        d.ready, d.boot_id = True, boot_id
        await until_alive(client, d, 1.0)
        reply = await client.chat("hello", "www", "and")
        assert reply.route == route


async def until_alive(client: Client, engine: FakeEngine, value: float) -> None:
    async def poll() -> None:
        labels = {"role": engine.role, "worker": engine.url}
        while await client.metric("ppd_worker_alive", **labels) != value:
            pass

    await asyncio.wait_for(poll(), 5.0)


async def test_a_worker_that_hangs_does_not_keep_another_from_being_seen_again(
    cluster: Cluster,
) -> None:
    """Probes take up to five seconds; a worker that is back is seen after one interval."""
    p, d = workers(answering(), answering())
    stuck = FakeEngine("decode", answering())
    async with cluster(p, d, stuck) as client:
        d.ready = False
        await until_alive(client, d, 0.0)
        stuck.probes_hang = True
        await asyncio.wait_for(stuck.probed.wait(), 5.0)
        d.ready = True
        await asyncio.wait_for(until_alive(client, d, 1.0), 2.0)


async def test_a_home_lost_between_turns_sends_the_turn_elsewhere(cluster: Cluster) -> None:
    p = FakeEngine("prefill", answering())
    decoders = [FakeEngine("decode", answering()) for _ in range(2)]
    async with AsyncExitStack() as alive:
        serving = {d: await alive.enter_async_context(stoppable(d)) for d in decoders}
        async with cluster(p, *decoders, probe_interval_s=60.0) as client:
            await client.chat("hello")
            (home,) = (d for d in decoders if d.bodies)
            (other,) = (d for d in decoders if not d.bodies)
            await serving[home].aclose()
            reply = await client.chat("hello", "www", "and")
            assert (reply.status, reply.route) == (200, ("remote", "home_gone"))
            assert len(other.bodies) == 1


async def dropping(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Takes the request and drops the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_request_that_kills_is_sent_twice_at_most(cluster: Cluster) -> None:
    p = FakeEngine("prefill", answering())
    decoders = [FakeEngine("decode", dropping) for _ in range(4)]
    async with cluster(p, *decoders) as client:
        reply = await client.chat("poison")
        assert reply.status == 502
        assert sum(len(d.bodies) for d in decoders) == 2


async def test_a_worker_that_dropped_a_connection_but_lives_keeps_its_conversations(
    cluster: Cluster,
) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        await client.chat("hello")
        whole, d.script = d.script, dropping
        assert (await client.chat("other")).status == 502
        assert await client.metric("ppd_worker_alive", role="decode", worker=d.url) == 1
        d.script = whole
        assert (await client.chat("hello", "www", "and")).route == ("local", "policy_full")


async def test_a_silent_worker_is_neither_dead_nor_asked_again(cluster: Cluster) -> None:
    p, d = workers(answering(), hanging)
    async with cluster(p, d, answer_timeout_s=0.2) as client:
        assert (await client.chat("hello")).status == 504
        assert len(d.bodies) == 1
        assert await client.metric("ppd_worker_alive", role="decode", worker=d.url) == 1


async def test_an_error_inside_a_stream_is_no_success(cluster: Cluster) -> None:
    async def out_of_memory(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token("one") + event({"error": {"message": "oom", "code": 500}}))
        await response.write(DONE)
        return response

    p, d = workers(answering(), out_of_memory)
    async with cluster(p, d) as client:
        reply = await client.chat("hello", stream=True)
        assert reply.events[-1]["error"]["message"] == "oom"
        labels = {"endpoint": "/v1/chat/completions", "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("resets", [False, True], ids=["ends", "resets"])
async def test_an_error_inside_a_stream_is_told_once(
    cluster: Cluster, path: str, resets: bool
) -> None:
    """Also where the worker says no ``[DONE]`` behind it."""

    async def dying(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token("one") if path != "/generate" else event({"text": "one"}))
        await response.write(event({"error": {"message": "oom", "code": 500}}))
        if resets:
            assert request.transport is not None
            request.transport.abort()
        return response

    p, d = workers(answering(), dying)
    async with cluster(p, d) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "text": "hello", "stream": True}
        reply = await client.post(path, body)
        assert [e["error"]["message"] for e in reply.events if "error" in e] == ["oom"]
        labels = {"endpoint": path, "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_workers_bare_500_becomes_an_openai_error(cluster: Cluster) -> None:
    async def bare(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return web.Response(status=500, text="Internal Server Error")

    p, d = workers(bare, bare)
    async with cluster(p, d) as client:
        reply = await client.chat("hello")
        assert reply.status == 500
        assert reply.json["error"]["message"] == "Internal Server Error"


class Broken(Policy):
    """A policy with a bug."""

    def choose(self, features: Features, objective: Objective) -> Decision:
        raise ZeroDivisionError


async def test_a_bug_of_ours_is_an_openai_error_too_and_counted(cluster: Cluster) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d, choosing=Broken()) as client:
        await client.chat("hello")
        reply = await client.chat("hello", "www", "and")
        assert (reply.status, reply.json["error"]["type"]) == (500, "router_error")
        labels = {"endpoint": "/v1/chat/completions", "outcome": "internal_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


@pytest.mark.parametrize("levels", [300, 2000])
async def test_deep_nesting_is_refused(cluster: Cluster, levels: int) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        nested = b"[" * levels + b"]" * levels
        body = b'{"messages": [{"role": "user", "content": "x"}], "unknown": ' + nested + b"}"
        assert (await client.post("/v1/chat/completions", body)).status == 400


async def test_a_body_that_is_not_what_it_says_is_refused(cluster: Cluster) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        headers = {"Content-Encoding": "gzip"}
        reply = await client.post("/v1/chat/completions", b"not gzip", headers)
        assert reply.status == 415


async def test_a_bug_of_ours_in_mid_stream_is_not_the_workers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sees that the stream did not end well."""

    def bug(*_: Any) -> None:
        raise ValueError("a bug")

    gate = asyncio.Event()

    async def in_two(engine: FakeEngine, request: web.Request, body: Any) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token("one"))
        await gate.wait()
        await response.write(DONE)
        return response

    monkeypatch.setattr(Ledger, "learn", bug)
    p, d = workers(answering(), in_two)
    async with cluster(p, d) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with client.http.post(f"{client.url}/v1/chat/completions", json=body) as answer:
            assert await answer.content.readany() == token("one")
            gate.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        labels = {"endpoint": "/v1/chat/completions", "outcome": "internal_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_prefill_worker_is_free_when_it_has_answered(cluster: Cluster) -> None:
    p, d = workers(answering(), streaming_forever)
    async with cluster(p, d) as client:
        asked = asyncio.create_task(client.chat("hello", stream=True))
        labels = {"role": "prefill", "worker": p.url}
        await d.arrived.wait()
        while await client.metric("ppd_turns_total", **REMOTE) < 1:
            pass
        while await client.metric("ppd_worker_in_flight", **labels):
            pass
        labels = {"role": "decode", "worker": d.url}
        assert await client.metric("ppd_worker_in_flight", **labels) == 1
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
