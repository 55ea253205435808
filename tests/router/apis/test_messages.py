"""The Messages API, requested by Anthropic's client library."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from eval.fake_worker.state import MODEL

from ..conftest import Cluster
from ..scripts import failing
from .clients import TOOL_CALL, by_anthropic, replying, running_cluster


async def test_a_message(cluster: Cluster) -> None:
    async with (
        running_cluster(cluster, replying("four")) as (client, d),
        by_anthropic(client) as api,
    ):
        message = await api.messages.create(
            model=MODEL,
            max_tokens=9,
            system="count",
            stop_sequences=["!"],
            messages=[{"role": "user", "content": [{"type": "text", "text": "two and two?"}]}],
        )
        assert message.content[0].type == "text"
        assert message.content[0].text == "four"
        assert message.stop_reason == "end_turn"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (36, 64)
        assert message.usage.output_tokens == 5
        sent = d.bodies[-1]
        assert sent["messages"][0] == {"role": "system", "content": "count"}
        assert sent["messages"][1] == {"role": "user", "content": "two and two?"}
        assert (sent["max_tokens"], sent["stop"]) == (9, ["!"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_uses_tools(cluster: Cluster, stream: bool) -> None:
    script = replying("let me see", (TOOL_CALL,), "tool_calls")
    fields: Any = {
        "model": MODEL,
        "max_tokens": 99,
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [{"role": "user", "content": "Ulm?"}],
    }
    async with running_cluster(cluster, script) as (client, d), by_anthropic(client) as api:
        if stream:
            async with api.messages.stream(**fields) as events:
                message: Any = await events.get_final_message()
        else:
            message = await api.messages.create(**fields)
        text, use = message.content
        assert (text.text, use.name, use.input) == ("let me see", "weather", {"city": "Ulm"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == 5
        assert d.bodies[-1]["tool_choice"] == "required"
        assert d.bodies[-1]["parallel_tool_calls"] is False
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
        fields["messages"] += [
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        await api.messages.create(**fields)
        sent = d.bodies[-1]["messages"]
        assert [m["role"] for m in sent] == ["user", "assistant", "tool", "user"]
        assert sent[1]["tool_calls"][0]["function"]["name"] == "weather"
        assert (sent[2]["content"], sent[3]["content"]) == ("rain", "so?")


async def test_images_in_a_tools_result(cluster: Cluster) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    shown = [{"type": "text", "text": "a map"}, {"type": "image", "source": source}]
    use = {"type": "tool_use", "id": "c", "name": "map", "input": {}}
    messages: Any = [
        {"role": "user", "content": "Ulm?"},
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": shown}],
        },
    ]
    async with (
        running_cluster(cluster, replying("four")) as (client, d),
        by_anthropic(client) as api,
    ):
        await api.messages.create(model=MODEL, max_tokens=9, messages=messages)
        *_, result = d.bodies[-1]["messages"]
        assert result["tool_call_id"] == "c"
        assert result["content"] == [
            {"type": "text", "text": "a map"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
        ]


async def test_errors_have_anthropics_format(cluster: Cluster) -> None:
    async with (
        running_cluster(cluster, failing(500, "oom")) as (client, _),
        by_anthropic(client) as api,
    ):
        fields: Any = {"model": MODEL, "max_tokens": 9}
        hello: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.InternalServerError, match="oom"):
            await api.messages.create(**fields, messages=hello)
        with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
            await api.messages.create(**{**fields, "model": "m"}, messages=hello)
        assert unknown.value.body == {
            "type": "error",
            "error": {
                "type": "not_found_error",
                "message": "the model 'm' does not exist; available: fake",
            },
        }
        unsupported: Any = [{"role": "user", "content": [{"type": "audio"}]}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
            await api.messages.create(**fields, messages=unsupported)
        labels = {"endpoint": "/v1/messages", "outcome": "rejected"}
        assert await client.metric("ppd_finished_total", **labels) == 1
