"""Other APIs than the engine's own, spoken by the clients they are for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from ..conftest import Client, Cluster
from ..fake_engine import (
    DONE,
    MODEL,
    FakeEngine,
    Script,
    answering,
    event,
    failing,
    hanging,
    start_stream,
    usage,
)

TOOL_CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}


def saying(text: str, calls: tuple[dict[str, Any], ...] = (), finish: str = "stop") -> Script:
    """A reply, whole or token by token; its usage says 100 in, 64 of them cached, 5 out."""

    async def script(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        counts = usage(100, 5, 64)
        if not body.get("stream"):
            message = {"role": "assistant", "content": text or None, "tool_calls": list(calls)}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            answer = {"id": "c1", "object": "chat.completion", "choices": [choice]}
            return web_json({**answer, "usage": counts})
        response = await start_stream(request)

        async def send(delta: dict[str, Any], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await response.write(event({"id": "c1", "choices": [choice]}))

        await send({"role": "assistant", "content": ""})
        for letter in text:
            await send({"content": letter})
        for call in calls:
            function = call["function"]
            begun = {**call, "function": {"name": function["name"], "arguments": ""}}
            await send({"tool_calls": [begun]})
            for letter in function["arguments"]:
                part = {"index": call["index"], "function": {"arguments": letter}}
                await send({"tool_calls": [part]})
        await send({}, finish)
        await response.write(event({"id": "c1", "choices": [], "usage": counts}) + DONE)
        return response

    return script


def web_json(value: object) -> Any:
    from aiohttp import web

    return web.json_response(value)


@asynccontextmanager
async def scene(
    cluster: Cluster, script: Script, **options: Any
) -> AsyncIterator[tuple[Client, FakeEngine]]:
    decode = FakeEngine("decode", script)
    async with cluster(FakeEngine("prefill", answering()), decode, **options) as client:
        yield client, decode


@asynccontextmanager
async def by_openai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{client.url}/v1", api_key="k", max_retries=0
    ) as speaker:
        yield speaker


@asynccontextmanager
async def by_anthropic(client: Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=client.url, api_key="k", max_retries=0) as speaker:
        yield speaker


# -- Responses ------------------------------------------------------------------------------


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


# -- Messages -------------------------------------------------------------------------------


async def test_a_message(cluster: Cluster) -> None:
    async with scene(cluster, saying("four")) as (client, d), by_anthropic(client) as speaker:
        told = await speaker.messages.create(
            model=MODEL,
            max_tokens=9,
            system="count",
            stop_sequences=["!"],
            messages=[{"role": "user", "content": [{"type": "text", "text": "two and two?"}]}],
        )
        assert told.content[0].type == "text"
        assert told.content[0].text == "four"
        assert told.stop_reason == "end_turn"
        assert (told.usage.input_tokens, told.usage.cache_read_input_tokens) == (36, 64)
        assert told.usage.output_tokens == 5
        asked = d.bodies[-1]
        assert asked["messages"][0] == {"role": "system", "content": "count"}
        assert asked["messages"][1] == {"role": "user", "content": "two and two?"}
        assert (asked["max_tokens"], asked["stop"]) == (9, ["!"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_uses_tools(cluster: Cluster, stream: bool) -> None:
    script = saying("let me see", (TOOL_CALL,), "tool_calls")
    asked: Any = {
        "model": MODEL,
        "max_tokens": 99,
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "messages": [{"role": "user", "content": "Ulm?"}],
    }
    async with scene(cluster, script) as (client, d), by_anthropic(client) as speaker:
        if stream:
            async with speaker.messages.stream(**asked) as events:
                told: Any = await events.get_final_message()
        else:
            told = await speaker.messages.create(**asked)
        text, use = told.content
        assert (text.text, use.name, use.input) == ("let me see", "weather", {"city": "Ulm"})
        assert told.stop_reason == "tool_use"
        assert told.usage.output_tokens == 5
        assert d.bodies[-1]["tool_choice"] == "required"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
        asked["messages"] += [
            {"role": "assistant", "content": [block.model_dump() for block in told.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        await speaker.messages.create(**asked)
        said = d.bodies[-1]["messages"]
        assert [m["role"] for m in said] == ["user", "assistant", "tool", "user"]
        assert said[1]["tool_calls"][0]["function"]["name"] == "weather"
        assert (said[2]["content"], said[3]["content"]) == ("rain", "so?")


async def test_errors_of_messages_are_anthropics(cluster: Cluster) -> None:
    async with scene(cluster, failing(500, "oom")) as (client, _), by_anthropic(client) as speaker:
        asked: Any = {"model": MODEL, "max_tokens": 9}
        hello: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.InternalServerError, match="oom"):
            await speaker.messages.create(**asked, messages=hello)
        with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
            await speaker.messages.create(**{**asked, "model": "m"}, messages=hello)
        assert unknown.value.body == {
            "type": "error",
            "error": {
                "type": "not_found_error",
                "message": "the model 'm' does not exist; available: fake",
            },
        }
        odd: Any = [{"role": "user", "content": [{"type": "audio"}]}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
            await speaker.messages.create(**asked, messages=odd)
        labels = {"endpoint": "/v1/messages", "outcome": "rejected"}
        assert await client.metric("ppd_finished_total", **labels) == 1


# -- several samples ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_are_one_answer(cluster: Cluster, stream: bool) -> None:
    async with scene(cluster, saying("four")) as (client, d), by_openai(client) as speaker:
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3}
        if stream:
            texts = ["", "", ""]
            counted = []
            async for chunk in await speaker.chat.completions.create(
                **asked, seed=7, stream=True, stream_options={"include_usage": True}
            ):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                counted += [chunk.usage] if chunk.usage else []
            (total,) = counted
        else:
            answer = await speaker.chat.completions.create(**asked, seed=7)
            texts = [str(choice.message.content) for choice in answer.choices]
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            total = answer.usage
        assert texts == ["four"] * 3
        assert (total.prompt_tokens, total.completion_tokens) == (100, 15)
        assert sorted(body["seed"] for body in d.bodies) == [7, 8, 9]
        assert {body["n"] for body in d.bodies} == {1}


async def test_a_failed_sample_fails_the_answer(cluster: Cluster) -> None:
    async with scene(cluster, failing(500, "oom")) as (client, _), by_openai(client) as speaker:
        with pytest.raises(openai.InternalServerError, match="oom"):
            await speaker.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], n=2
            )


@pytest.mark.parametrize("stream", [False, True])
async def test_when_a_sample_is_refused_nobody_waits_for_the_others(
    cluster: Cluster, stream: bool
) -> None:
    waiting, given_up = asyncio.Barrier(3), asyncio.Barrier(3)

    async def script(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        await waiting.wait()
        if body["seed"] == 8:
            return await failing(400, "not that one")(engine, request, body)
        try:
            return await hanging(engine, request, body)
        finally:
            await given_up.wait()

    p, d = FakeEngine("prefill", answering()), FakeEngine("decode", script)
    async with cluster(p, d) as client:
        reply = await client.chat("hello", n=3, seed=7, stream=stream)
        assert (reply.status, b"not that one" in reply.body) == (400, True)
        await given_up.wait()


# -- passed on as it comes ------------------------------------------------------------------


async def test_embeddings_go_to_the_workers_that_serve_them(cluster: Cluster) -> None:
    async def embed(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        vector = [0.5] * len(body["input"])
        data = [{"object": "embedding", "index": 0, "embedding": vector}]
        return web_json({"object": "list", "model": "e", "data": data, "usage": {}})

    embedder = FakeEngine("null", embed)
    async with embedder.serving():
        options = {"embedding": (embedder.url,), "worker_api_key": "inner"}
        async with scene(cluster, saying("x"), **options) as (client, _):
            async with by_openai(client) as speaker:
                told = await speaker.embeddings.create(
                    model="e", input="abc", encoding_format="float"
                )
            assert told.data[0].embedding == [0.5] * 3
            assert embedder.headers[-1]["authorization"] == "Bearer inner"
    # It is gone now, and the router is not.
    async with scene(cluster, saying("x"), embedding=(embedder.url,)) as (client, _):
        reply = await client.post("/v1/embeddings", {"model": "e", "input": "abc"})
        assert (reply.status, reply.json["error"]["type"]) == (503, "worker_error")
