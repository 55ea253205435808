"""Errors as clients get them: the engine's, inside streams, and our own."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from eval.dialects import DONE, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from ppd.attempts import Attempts
from ppd.decision import Decision, Features, Policy
from ppd.effects import Answered, Effect, Event
from ppd.score import Objective
from router.serving.recorder import RequestRecorder

from ..conftest import Cluster
from ..fixtures import CHAT, chat
from ..scripts import answering, streaming_forever, token
from .faulty import REMOTE, workers


async def test_an_error_inside_a_stream_is_no_success(cluster: Cluster) -> None:
    async def out_of_memory(request: Request) -> None:
        request.send(token("one") + event({"error": {"message": "oom", "code": 500}}))
        request.send(DONE)

    p, d = workers(answering(), out_of_memory)
    async with cluster(p, d) as client:
        reply = await client.chat("hello", stream=True)
        assert reply.events[-1]["error"]["message"] == "oom"
        labels = {"endpoint": "/v1/chat/completions", "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("resets", [False, True], ids=["ends", "resets"])
async def test_an_error_inside_a_stream_is_reported_once(
    cluster: Cluster, path: str, resets: bool
) -> None:
    """Also where the worker says no ``[DONE]`` behind it."""

    async def dying(request: Request) -> None:
        request.send(token("one") if path != "/generate" else event({"text": "one"}))
        request.send(event({"error": {"message": "oom", "code": 500}}))
        if resets:
            request.drop()

    p, d = workers(answering(), dying)
    async with cluster(p, d) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "text": "hello", "stream": True}
        reply = await client.post(path, body)
        assert [e["error"]["message"] for e in reply.events if "error" in e] == ["oom"]
        labels = {"endpoint": path, "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_workers_bare_500_becomes_an_openai_error(cluster: Cluster) -> None:
    async def bare(request: Request) -> None:
        request.answer_bytes(b"Internal Server Error", 500, {"content-type": "text/plain"})

    p, d = workers(bare, bare)
    async with cluster(p, d) as client:
        reply = await client.chat("hello")
        assert reply.status == 500
        assert reply.json["error"]["message"] == "Internal Server Error"


def refusing(status: int, body: dict[str, Any], **headers: str) -> Script:
    async def script(request: Request) -> None:
        request.answer(body, status=status, headers=headers)

    return script


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_the_router_is_at_fault(cluster: Cluster, status: int) -> None:
    """And not the client: where there is another worker, it does not notice."""
    p, d = workers(answering(), refusing(status, {"error": "Unauthorized"}))
    other = FakeWorker("decode", d.script)
    async with cluster(p, d, other, worker_api_key="inner") as client:
        reply = await client.chat("hello")
        told = reply.json["error"]
        assert (reply.status, told["type"]) == (502, "worker_error")
        assert "decode worker refuses the router" in told["message"]
        d.script = answering()
        for i in range(4):
            assert (await client.chat(f"hello {i}")).status == 200
        labels = {"endpoint": "/v1/chat/completions", "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_workers_judge_is_the_clients_own(cluster: Cluster, status: int) -> None:
    """As often as he likes: who comes after him is served."""
    p, d = workers(answering(), refusing(status, {"error": "Unauthorized"}))
    async with cluster(p, d, breaker_failures=2) as client:
        for _ in range(4):
            reply = await client.post(CHAT, chat("hello"), {"Authorization": "Bearer guess"})
            assert (reply.status, reply.json["error"]["type"]) == (status, "invalid_request_error")
        assert d.headers[-1]["authorization"] == "Bearer guess"
        labels = {"endpoint": "/v1/chat/completions", "outcome": "rejected"}
        assert await client.metric("ppd_finished_total", **labels) == 4
        assert not (await client.workers())[d.url]["breaker_open"]


async def test_a_workers_429_is_passed_on_with_when_to_come_again(cluster: Cluster) -> None:
    busy = refusing(429, {"error": {"message": "queue full"}}, **{"Retry-After": "7"})
    p, d = workers(answering(), busy)
    async with cluster(p, d) as client:
        reply = await client.chat("hello")
        assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
        assert reply.headers["Retry-After"] == "7"
        labels = {"endpoint": "/v1/chat/completions", "outcome": "overloaded"}
        assert await client.metric("ppd_finished_total", **labels) == 1


@pytest.mark.parametrize(
    "body", [{"detail": "no such adapter"}, {"error": {"message": "no such adapter", "code": "x"}}]
)
async def test_a_workers_4xx_stays_one_whatever_its_code(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    p, d = workers(answering(), refusing(404, body))
    async with cluster(p, d) as client:
        reply = await client.chat("hello")
        assert (reply.status, reply.json["error"]["message"]) == (404, "no such adapter")
        assert reply.json["error"]["type"] == "invalid_request_error"


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_in_a_callback_before_an_answer_is_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    on = Attempts.on

    def with_a_bug(attempts: Attempts, event: Event, now_s: float) -> Effect:
        if type(event) is Answered:
            raise ZeroDivisionError
        return on(attempts, event, now_s)

    monkeypatch.setattr(Attempts, "on", with_a_bug)
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        reply = await client.post("/v1/chat/completions", chat("hello", stream=stream))
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


async def test_a_body_that_differs_from_its_headers_is_refused(cluster: Cluster) -> None:
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

    async def in_two(request: Request) -> None:
        request.send(token("one"))
        await gate.wait()
        request.send(DONE)

    monkeypatch.setattr(RequestRecorder, "record_answer", bug)
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
