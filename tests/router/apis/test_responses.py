"""The Responses API, spoken by OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eval.cluster import free_port
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from router.apis.response_store import ResponseStore, StoredResponse
from router.config.limits import RateLimit
from router.config.options import RouterConfig
from router.peers import Peers
from router.server.run import running

from ..conftest import Client, Cluster
from ..scene import serving, workers
from ..scripts import failing
from .speaking import TOOL_CALL, by_openai, saying, scene

RESPONSES = "/v1/responses"


async def test_a_response_and_the_next_one_by_its_id(cluster: Cluster) -> None:
    async with scene(cluster, saying("four")) as (client, d), by_openai(client) as speaker:
        first = await speaker.responses.create(
            model=MODEL, input="two and two?", instructions="count", max_output_tokens=9
        )
        assert (first.output_text, first.status) == ("four", "completed")
        assert first.usage is not None
        assert (first.usage.input_tokens, first.usage.output_tokens) == (100, 5)
        assert first.usage.input_tokens_details.cached_tokens == 64
        assert d.bodies[-1]["max_completion_tokens"] == 9
        await speaker.responses.create(
            model=MODEL, input="and two?", instructions="count", previous_response_id=first.id
        )
        said = [(m["role"], m["content"]) for m in d.bodies[-1]["messages"]]
        assert said == [
            ("system", "count"),
            ("user", "two and two?"),
            ("assistant", "four"),
            ("user", "and two?"),
        ]
        # It is the same conversation: the later turn was local.
        labels = {"endpoint": "/v1/chat/completions", "route": "local", "reason": "policy_full"}
        assert await client.metric("ppd_turns_total", **labels) == 1


async def test_a_streamed_response_adds_up(cluster: Cluster) -> None:
    async with scene(cluster, saying("four")) as (client, d), by_openai(client) as speaker:
        stream = await speaker.responses.create(model=MODEL, input="two and two?", stream=True)
        events = [one async for one in stream]
        kinds = [one.type for one in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert "".join(deltas) == "four"
        assert [one.sequence_number for one in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "four"
        again = await speaker.responses.create(
            model=MODEL, input="more", previous_response_id=last.response.id
        )
        assert again.previous_response_id == last.response.id
        assert d.bodies[-1]["messages"][1] == {"role": "assistant", "content": "four"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_calls_functions_and_gets_their_results(
    cluster: Cluster, stream: bool
) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    script = saying("", (TOOL_CALL,), "tool_calls")
    async with scene(cluster, script) as (client, d), by_openai(client) as speaker:
        asked: Any = {"model": MODEL, "input": "Ulm?", "tools": tools}
        if stream:
            async with speaker.responses.stream(**asked) as events:
                response: Any = await events.get_final_response()
        else:
            response = await speaker.responses.create(**asked)
        (call,) = response.output
        assert (call.type, call.name, call.call_id) == ("function_call", "weather", "call_1")
        assert call.arguments == '{"city": "Ulm"}'
        assert d.bodies[-1]["tools"][0]["function"]["name"] == "weather"
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        await speaker.responses.create(
            model=MODEL, input=[result], tools=tools, previous_response_id=response.id
        )
        call_again, told = d.bodies[-1]["messages"][1:]
        assert call_again["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
        assert told == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


async def test_responses_that_end_otherwise(cluster: Cluster) -> None:
    script = saying("fo", finish="length")
    async with scene(cluster, script) as (client, d), by_openai(client) as speaker:
        short = await speaker.responses.create(model=MODEL, input="x", store=False)
        assert short.status == "incomplete"
        with pytest.raises(openai.NotFoundError, match="no response"):
            await speaker.responses.create(model=MODEL, input="x", previous_response_id=short.id)
        unknown: Any = [{"type": "computer"}]
        with pytest.raises(openai.BadRequestError, match=r"input\[0\] is of no kind"):
            await speaker.responses.create(model=MODEL, input=unknown)
        d.script = failing(500, "out of memory")
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await speaker.responses.create(model=MODEL, input="x")


async def test_nobody_continues_anothers_response(cluster: Cluster) -> None:
    async with scene(cluster, saying("four")) as (client, _), by_openai(client) as speaker:
        mine = await speaker.responses.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError):
            await speaker.with_options(api_key="other").responses.create(
                model=MODEL, input="x", previous_response_id=mine.id
            )


async def test_a_response_is_shown_and_deleted(cluster: Cluster) -> None:
    async with scene(cluster, saying("four")) as (client, _), by_openai(client) as speaker:
        made = await speaker.responses.create(model=MODEL, input="x", metadata={"of": "mine"})
        shown = await speaker.responses.retrieve(made.id)
        assert shown == made
        stranger = speaker.with_options(api_key="other")
        for call in (stranger.responses.retrieve, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await call(made.id)
        await speaker.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.create(model=MODEL, input="y", previous_response_id=made.id)
        for odd in ("resp_", "resp_zz_1", "resp_ffffffff_1", "x"):
            with pytest.raises(openai.NotFoundError):
                await speaker.responses.retrieve(odd)


def some(size: int) -> StoredResponse:
    return StoredResponse(b"r" * (size // 2), b"m" * (size - size // 2))


def test_what_is_kept_is_bounded_in_bytes_and_time() -> None:
    now_s = 0.0
    store = ResponseStore(10, 5.0, lambda: now_s)
    for name in ("a", "b", "c"):
        store.put("t", name, some(4))
    assert [store.get("t", name) for name in ("a", "b", "c")] == [None, some(4), some(4)]
    assert store.get("other", "b") is None
    assert store.pop("t", "b") == some(4)
    store.put("t", "d", some(6))
    assert store.get("t", "c") == some(4)  # what was deleted takes no room
    now_s = 6.0
    assert store.get("t", "d") is None
    store.put("other", "e", some(10))  # nor does what nobody can have any more
    assert store.get("other", "e") == some(10)


def test_nobody_loses_what_is_kept_to_one_who_keeps_more() -> None:
    store = ResponseStore(100, 5.0, lambda: 0.0)
    store.put("small", "a", some(10))
    store.put("large", "all", some(101))
    assert store.get("large", "all") is None
    for i in range(20):
        store.put("large", str(i), some(20))
    assert store.get("small", "a") == some(10)
    assert [store.get("large", str(i)) is None for i in (0, 19)] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["metadata", "text"])
async def test_what_could_not_be_shown_again_is_refused(
    cluster: Cluster, field: str, stream: bool
) -> None:
    nested = b'{"a":' * 253 + b"1" + b"}" * 253
    body = b'{"model": "fake", "input": "x", "stream": %b, "%b": %b}'
    async with scene(cluster, saying("four")) as (client, d):
        raw = body % (str(stream).lower().encode(), field.encode(), nested)
        reply = await client.post(RESPONSES, raw)
        assert (reply.status, b"nested too deeply" in reply.body) == (400, True)
        assert not d.bodies


async def test_a_conversation_does_not_outgrow_what_a_body_may_be(cluster: Cluster) -> None:
    async with scene(cluster, saying("w" * 1500), max_body_bytes=1000) as (client, d):
        asked = {"model": MODEL, "input": "x"}
        first = await client.post(RESPONSES, asked)
        reply = await client.post(RESPONSES, {**asked, "previous_response_id": first.json["id"]})
        assert (reply.status, b"larger than 1000 bytes" in reply.body) == (413, True)
        assert len(d.bodies) == 1


async def test_who_asks_for_a_response_is_charged_and_counted(cluster: Cluster) -> None:
    limits = RateLimit(requests_per_minute=1)
    async with scene(cluster, saying("four"), rate=limits) as (client, _):
        made = (await client.post(RESPONSES, {"model": MODEL, "input": "x"})).json
        one = f"{client.url}{RESPONSES}/{made['id']}"
        async with client.http.get(one) as answer:  # the first has leaked away a little
            assert (answer.status, await answer.json()) == (200, made)
        async with client.http.delete(one) as answer:
            assert answer.status == 429
        for outcome in ("ok", "overloaded"):
            at = {"endpoint": "/v1/responses/{name}", "outcome": outcome}
            assert await client.metric("ppd_finished_total", **at) == 1


@asynccontextmanager
async def beside(sibling: str, *engines: FakeWorker) -> AsyncIterator[Client]:
    """A router whose sibling, number 1, has that URL."""
    async with serving(*engines), aiohttp.ClientSession() as http:
        urls = {engine.role: (engine.url,) for engine in engines}
        config = RouterConfig(port=0, policy="full", **urls)  # type: ignore[arg-type]
        async with running(config, peers=Peers(0, {1: sibling}, "secret")) as url:
            yield Client(url, http)


async def test_who_hangs_up_while_another_process_is_asked_is_counted() -> None:
    asked = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    app = web.Application()
    app.router.add_get("/kept-responses", hang)
    async with TestServer(app) as server, beside(str(server.make_url("")), *workers()) as client:
        for name in ("resp_1_x", "resp_1_", f"resp_1_{'0' * 32}x", "x" * 1000):
            body = {"model": MODEL, "input": "x", "previous_response_id": name}
            assert (await client.post(RESPONSES, body)).status == 404
        assert not asked.is_set()
        body["previous_response_id"] = f"resp_1_{'0' * 32}"
        asking = asyncio.create_task(client.post(RESPONSES, body))
        await asked.wait()
        asking.cancel()
        at = {"endpoint": RESPONSES, "outcome": "disconnected"}
        while await client.metric("ppd_finished_total", **at) < 1:
            pass
        assert await client.metric("ppd_finished_total", **at) == 1


async def test_clients_are_not_told_where_other_processes_are() -> None:
    async with beside(f"http://127.0.0.1:{free_port()}", *workers()) as client:
        body = {"model": MODEL, "input": "x", "previous_response_id": f"resp_1_{'0' * 32}"}
        reply = await client.post(RESPONSES, body, {"Authorization": "Bearer k"})
        assert reply.status == 503
        assert reply.json["error"]["message"] == f"the process that has resp_1_{'0' * 32} is away"
