"""The Responses API, spoken by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from router.apis.kept import Shelf

from ..conftest import Cluster
from ..fake_engine import (
    MODEL,
    failing,
)
from .speaking import TOOL_CALL, by_openai, saying, scene


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


def test_what_is_kept_is_bounded_in_bytes_and_time() -> None:
    now_s = 0.0
    shelf = Shelf(10, 5.0, lambda: now_s)
    for name in ("a", "b", "c"):
        shelf.put("t", name, b"1234")
    assert [shelf.get("t", name) for name in ("a", "b", "c")] == [None, b"1234", b"1234"]
    assert shelf.get("other", "b") is None
    assert shelf.pop("t", "b") == b"1234"
    shelf.put("t", "d", b"123456")
    assert shelf.get("t", "c") == b"1234"  # what was deleted takes no room
    now_s = 6.0
    assert shelf.get("t", "d") is None
