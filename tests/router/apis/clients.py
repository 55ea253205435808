"""Workers with scripted replies, and the client libraries of other APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from ..conftest import Client, Cluster
from ..fake_engine import DONE, FakeEngine, Script, answering, event, start_stream, usage

TOOL_CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}


def replying(text: str, calls: tuple[dict[str, Any], ...] = (), finish: str = "stop") -> Script:
    """A reply with a usage of 100 prompt tokens, 64 of them cached, and 5 completion tokens."""

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
            opening = {**call, "function": {"name": function["name"], "arguments": ""}}
            await send({"tool_calls": [opening]})
            for letter in function["arguments"]:
                part = {"index": call["index"], "function": {"arguments": letter}}
                await send({"tool_calls": [part]})
        await send({}, finish)
        await response.write(event({"id": "c1", "choices": [], "usage": counts}) + DONE)
        return response

    return script


def web_json(value: object) -> Any:
    """A JSON response."""
    from aiohttp import web

    return web.json_response(value)


@asynccontextmanager
async def running_cluster(
    cluster: Cluster, script: Script, **options: Any
) -> AsyncIterator[tuple[Client, FakeEngine]]:
    """A router with a prefill worker and a decode worker that has this script."""
    decode = FakeEngine("decode", script)
    async with cluster(FakeEngine("prefill", answering()), decode, **options) as client:
        yield client, decode


@asynccontextmanager
async def by_openai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client library, connected to the router."""
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="k", max_retries=0) as api:
        yield api


@asynccontextmanager
async def by_anthropic(client: Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client library, connected to the router."""
    async with anthropic.AsyncAnthropic(base_url=client.url, api_key="k", max_retries=0) as api:
        yield api
