"""One turn of a chat through a router: its text and its times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from ppd.errors import WorkerError


@dataclass(slots=True)
class Reply:
    """The answer to one turn.

    Attributes:
        first_s: when its first text came; ``time.perf_counter``.
    """

    route: str
    text: str = ""
    first_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)


async def ask(http: aiohttp.ClientSession, router_url: str, body: dict[str, Any]) -> Reply:
    """Send one turn, and read its stream.

    Raises:
        WorkerError: it failed, or brought no usage.
    """
    fields = {
        "model": "default",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **body,
    }
    async with http.post(f"{router_url}/v1/chat/completions", json=fields) as answer:
        if answer.status != 200:
            raise WorkerError(f"a turn failed: {answer.status} {await answer.text()}")
        reply = Reply(answer.headers["X-PPD-Route"])
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                raise WorkerError(f"a turn failed: {chunk['error']}")
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    reply.first_s = reply.first_s or time.perf_counter()
                    reply.text += text
            reply.usage = chunk.get("usage") or reply.usage
    if not reply.usage:
        raise WorkerError("a turn's stream brought no usage")
    return reply
