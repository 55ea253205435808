"""The Responses API, requested by OpenAI's client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eval.cluster import free_port
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from ppd.errors import RequestError
from router.apis.response_store import ResponseStore, StoredResponse
from router.apis.responses import input_messages, to_chat
from router.config.limits import RateLimit
from router.config.options import RouterConfig
from router.peers import Peers
from router.server.run import running

from ..conftest import Client, Cluster
from ..fixtures import serving, workers
from ..scripts import failing
from .clients import TOOL_CALL, by_openai, replying, running_cluster

RESPONSES = "/v1/responses"


async def test_a_response_and_the_next_one_by_its_id(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("four")) as (client, d), by_openai(client) as api:
        first = await api.responses.create(
            model=MODEL, input="two and two?", instructions="count", max_output_tokens=9
        )
        assert (first.output_text, first.status) == ("four", "completed")
        assert first.usage is not None
        assert (first.usage.input_tokens, first.usage.output_tokens) == (100, 5)
        assert first.usage.input_tokens_details.cached_tokens == 64
        assert d.bodies[-1]["max_completion_tokens"] == 9
        await api.responses.create(
            model=MODEL, input="and two?", instructions="count", previous_response_id=first.id
        )
        sent = [(m["role"], m["content"]) for m in d.bodies[-1]["messages"]]
        assert sent == [
            ("system", "count"),
            ("user", "two and two?"),
            ("assistant", "four"),
            ("user", "and two?"),
        ]
        # It is the same conversation: the later turn was local.
        labels = {"endpoint": "/v1/chat/completions", "route": "local", "reason": "policy_full"}
        assert await client.metric("ppd_turns_total", **labels) == 1


@pytest.mark.parametrize(
    ("choice", "formatted"),
    [
        ("auto", True),
        (None, True),
        ("required", False),
        ({"type": "function", "name": "weather"}, False),
    ],
)
def test_a_forced_call_has_no_text_to_format(choice: Any, formatted: bool) -> None:
    """OpenAI takes both together, as instructor sends them. SGLang refuses them."""
    chat = to_chat(
        {
            "input": "hello",
            "tools": [{"type": "function", "name": "weather", "parameters": {}}],
            "tool_choice": choice,
            "text": {"format": {"type": "json_schema", "name": "w", "schema": {}}},
        },
        (),
    )
    assert ("response_format" in chat) is formatted


async def test_the_events_of_a_streamed_response(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("four")) as (client, d), by_openai(client) as api:
        stream = await api.responses.create(model=MODEL, input="two and two?", stream=True)
        events = [event async for event in stream]
        kinds = [event.type for event in events]
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
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "four"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "four"
        again = await api.responses.create(
            model=MODEL, input="more", previous_response_id=last.response.id
        )
        assert again.previous_response_id == last.response.id
        assert d.bodies[-1]["messages"][1] == {"role": "assistant", "content": "four"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_calls_functions_and_gets_their_results(
    cluster: Cluster, stream: bool
) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    script = replying("", (TOOL_CALL,), "tool_calls")
    async with running_cluster(cluster, script) as (client, d), by_openai(client) as api:
        fields: Any = {"model": MODEL, "input": "Ulm?", "tools": tools}
        if stream:
            async with api.responses.stream(**fields) as events:
                response: Any = await events.get_final_response()
        else:
            response = await api.responses.create(**fields)
        (call,) = response.output
        assert (call.type, call.name, call.call_id) == ("function_call", "weather", "call_1")
        assert call.arguments == '{"city": "Ulm"}'
        assert d.bodies[-1]["tools"][0]["function"]["name"] == "weather"
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        await api.responses.create(
            model=MODEL, input=[result], tools=tools, previous_response_id=response.id
        )
        call_again, sent_result = d.bodies[-1]["messages"][1:]
        assert call_again["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
        assert sent_result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def test_a_text_and_the_calls_after_it_are_one_message_of_the_assistant() -> None:
    """As two, a chat template would render what was never generated, and no cache would match."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]}
    image = {"type": "input_image", "image_url": "data:x"}
    output = [{"type": "input_text", "text": "rain"}, image]
    items: list[Any] = [
        {"role": "user", "content": "Ulm?"},
        said,
        {"type": "reasoning", "summary": []},
        call,
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": output[:1]},
        {"type": "function_call_output", "call_id": "d", "output": output},
        said,
    ]
    user, asks, first, second, last = input_messages(items)
    assert user == {"role": "user", "content": "Ulm?"}
    assert (asks["role"], asks["content"]) == ("assistant", "let me see")
    assert [one["id"] for one in asks["tool_calls"]] == ["c", "d"]
    assert first == {"role": "tool", "tool_call_id": "c", "content": "rain"}
    assert second["content"] == [
        {"type": "text", "text": "rain"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
    ]
    assert last == {"role": "assistant", "content": "let me see"}


@pytest.mark.parametrize(
    "output",
    [
        [{"type": "feature", "id": 1}],
        {"rain": True},
        [],
    ],
)
def test_what_is_no_part_of_a_message_is_passed_as_json(output: Any) -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    (message,) = input_messages([item])
    assert orjson.loads(message["content"]) == output


def test_a_part_that_is_not_served_is_refused() -> None:
    """As JSON in the prompt, an image would be megabytes of base64."""
    item = {"type": "function_call_output", "call_id": "c"}
    with pytest.raises(RequestError, match=r"input\[0\].content"):
        input_messages([{**item, "output": [{"type": "input_image", "file_id": "f"}]}])


async def test_incomplete_and_failed_responses(cluster: Cluster) -> None:
    script = replying("fo", finish="length")
    async with running_cluster(cluster, script) as (client, d), by_openai(client) as api:
        short: Any = await api.responses.create(model=MODEL, input="x", store=False)
        assert (short.status, short.output[0].status) == ("incomplete", "incomplete")
        async with api.responses.stream(model=MODEL, input="x") as events:
            streamed: Any = [event async for event in events][-1]
        assert (streamed.response.status, streamed.response.output[0].status) == (
            "incomplete",
            "incomplete",
        )
        with pytest.raises(openai.NotFoundError, match="no response"):
            await api.responses.create(model=MODEL, input="x", previous_response_id=short.id)
        unknown: Any = [{"type": "computer"}]
        with pytest.raises(openai.BadRequestError, match=r"input\[0\] is of no kind"):
            await api.responses.create(model=MODEL, input=unknown)
        d.script = failing(500, "out of memory")
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await api.responses.create(model=MODEL, input="x")


async def test_a_response_of_another_tenant_cannot_be_continued(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("four")) as (client, _), by_openai(client) as api:
        mine = await api.responses.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError):
            await api.with_options(api_key="other").responses.create(
                model=MODEL, input="x", previous_response_id=mine.id
            )


async def test_a_response_is_shown_and_deleted(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("four")) as (client, _), by_openai(client) as api:
        made = await api.responses.create(model=MODEL, input="x", metadata={"of": "mine"})
        shown = await api.responses.retrieve(made.id)
        assert shown == made
        async with client.http.head(f"{client.url}/v1/responses/{made.id}") as head:
            assert head.status == 405
        assert await api.responses.retrieve(made.id) == made, "HEAD deletes nothing"
        stranger = api.with_options(api_key="other")
        for call in (stranger.responses.retrieve, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await call(made.id)
        await api.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(model=MODEL, input="y", previous_response_id=made.id)
        for malformed in ("resp_", "resp_zz_1", "resp_ffffffff_1", "x"):
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(malformed)


def response_of(size: int) -> StoredResponse:
    """A response of so many bytes."""
    return StoredResponse(b"r" * (size // 2), b"m" * (size - size // 2))


def test_stored_responses_are_bounded_in_bytes_and_time() -> None:
    now_s = 0.0
    store = ResponseStore(10, 5.0, lambda: now_s)
    for name in ("a", "b", "c"):
        store.put("t", name, response_of(4))
    assert [store.get("t", name) for name in ("a", "b", "c")] == [
        None,
        response_of(4),
        response_of(4),
    ]
    assert store.get("other", "b") is None
    assert store.pop("t", "b") == response_of(4)
    store.put("t", "d", response_of(6))
    assert store.get("t", "c") == response_of(4)  # a deleted response takes no room
    now_s = 6.0
    assert store.get("t", "d") is None
    store.put("other", "e", response_of(10))  # nor does an expired one
    assert store.get("other", "e") == response_of(10)


def test_the_tenant_with_the_most_bytes_loses_responses() -> None:
    store = ResponseStore(100, 5.0, lambda: 0.0)
    store.put("small", "a", response_of(10))
    store.put("large", "all", response_of(101))
    assert store.get("large", "all") is None
    for i in range(20):
        store.put("large", str(i), response_of(20))
    assert store.get("small", "a") == response_of(10)
    assert [store.get("large", str(i)) is None for i in (0, 19)] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["metadata", "text"])
async def test_a_request_that_is_too_deep_for_its_response_is_refused(
    cluster: Cluster, field: str, stream: bool
) -> None:
    nested = b'{"a":' * 253 + b"1" + b"}" * 253
    body = b'{"model": "fake", "input": "x", "stream": %b, "%b": %b}'
    async with running_cluster(cluster, replying("four")) as (client, d):
        raw = body % (str(stream).lower().encode(), field.encode(), nested)
        reply = await client.post(RESPONSES, raw)
        assert (reply.status, b"nested too deeply" in reply.body) == (400, True)
        assert not d.bodies


async def test_a_conversation_beyond_the_size_of_a_body_is_refused(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("w" * 1500), max_body_bytes=1000) as (client, d):
        fields = {"model": MODEL, "input": "x"}
        first = await client.post(RESPONSES, fields)
        reply = await client.post(RESPONSES, {**fields, "previous_response_id": first.json["id"]})
        assert (reply.status, b"larger than 1000 bytes" in reply.body) == (413, True)
        assert len(d.bodies) == 1


async def test_requests_for_stored_responses_are_charged_and_counted(cluster: Cluster) -> None:
    limits = RateLimit(requests_per_minute=1)
    async with running_cluster(cluster, replying("four"), rate=limits) as (client, _):
        made = (await client.post(RESPONSES, {"model": MODEL, "input": "x"})).json
        url = f"{client.url}{RESPONSES}/{made['id']}"
        async with client.http.get(url) as answer:  # the bucket has refilled a little
            assert (answer.status, await answer.json()) == (200, made)
        async with client.http.delete(url) as answer:
            assert answer.status == 429
        for outcome in ("ok", "overloaded"):
            at = {"endpoint": "/v1/responses/{name}", "outcome": outcome}
            assert await client.metric("ppd_finished_total", **at) == 1


@asynccontextmanager
async def with_peer(peer_url: str, *engines: FakeWorker) -> AsyncIterator[Client]:
    """A router with one peer, number 1, at this URL."""
    async with serving(*engines), aiohttp.ClientSession() as http:
        urls = {engine.role: (engine.url,) for engine in engines}
        config = RouterConfig(port=0, policy="full", **urls)  # type: ignore[arg-type]
        async with running(config, peers=Peers(0, {1: peer_url}, "secret")) as url:
            yield Client(url, http)


async def test_a_client_that_disconnects_during_a_peer_request_is_counted() -> None:
    requested = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        requested.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    app = web.Application()
    app.router.add_get("/kept-responses", hang)
    async with TestServer(app) as server, with_peer(str(server.make_url("")), *workers()) as client:
        for name in ("resp_1_x", "resp_1_", f"resp_1_{'0' * 32}x", "x" * 1000):
            body = {"model": MODEL, "input": "x", "previous_response_id": name}
            assert (await client.post(RESPONSES, body)).status == 404
        assert not requested.is_set()
        body["previous_response_id"] = f"resp_1_{'0' * 32}"
        request_task = asyncio.create_task(client.post(RESPONSES, body))
        await requested.wait()
        request_task.cancel()
        at = {"endpoint": RESPONSES, "outcome": "disconnected"}
        while await client.metric("ppd_finished_total", **at) < 1:
            pass
        assert await client.metric("ppd_finished_total", **at) == 1


async def test_errors_do_not_name_the_urls_of_peers() -> None:
    async with with_peer(f"http://127.0.0.1:{free_port()}", *workers()) as client:
        body = {"model": MODEL, "input": "x", "previous_response_id": f"resp_1_{'0' * 32}"}
        reply = await client.post(RESPONSES, body, {"Authorization": "Bearer k"})
        assert reply.status == 503
        assert reply.json["error"]["message"] == f"the process that has resp_1_{'0' * 32} is away"
