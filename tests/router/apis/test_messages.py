"""The Messages API, spoken by Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from eval.fake_worker.state import MODEL

from ..conftest import Cluster
from ..scripts import failing
from .speaking import TOOL_CALL, by_anthropic, saying, scene


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
