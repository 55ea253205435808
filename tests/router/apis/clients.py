"""Workers with scripted replies, and the client libraries of other APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from eval.dialects import DONE, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker

from ..conftest import Client, Cluster
from ..scripts import answering, usage

TOOL_CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}


def replying(text: str, calls: tuple[dict[str, Any], ...] = (), finish: str = "stop") -> Script:
    """A reply with a usage of 100 prompt tokens, 64 of them cached, and 5 completion tokens."""

    async def script(request: Request) -> None:
        counts = usage(100, 5, 64)
        if not request.body.get("stream"):
            message = {"role": "assistant", "content": text or None, "tool_calls": list(calls)}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            answer = {"id": "c1", "object": "chat.completion", "choices": [choice]}
            request.answer({**answer, "usage": counts})
            return

        def send(delta: dict[str, Any], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            request.send(event({"id": "c1", "choices": [choice]}))

        send({"role": "assistant", "content": ""})
        for letter in text:
            send({"content": letter})
        for call in calls:
            function = call["function"]
            opening = {**call, "function": {"name": function["name"], "arguments": ""}}
            send({"tool_calls": [opening]})
            for letter in function["arguments"]:
                part = {"index": call["index"], "function": {"arguments": letter}}
                send({"tool_calls": [part]})
        send({}, finish)
        request.send(event({"id": "c1", "choices": [], "usage": counts}) + DONE)

    return script


@asynccontextmanager
async def running_cluster(
    cluster: Cluster, script: Script, **options: Any
) -> AsyncIterator[tuple[Client, FakeWorker]]:
    """A router with a prefill worker and a decode worker that has this script."""
    decode = FakeWorker("decode", script)
    async with cluster(FakeWorker("prefill", answering()), decode, **options) as client:
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
