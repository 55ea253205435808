"""The one client of OpenAI chat streams: one turn, its text, its tokens and its times.

It is a layer on the ``openai`` client, as an application would use it. The caller holds the
messages; a :class:`Conversation` holds them for callers that need no other order.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ppd.errors import WorkerError

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

Message = dict[str, Any]

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Reply:
    """The answer to one turn.

    Attributes:
        headers: of the response.
        sent_s, first_s: when the request was sent and when its first text came;
            ``time.perf_counter``.
        ids: token ids of the reply; empty if the server does not return them.
        cached_tokens: of the prompt, as the engine reports them.
        citations: of the passages that a router's retrieval has placed.
    """

    headers: Mapping[str, str]
    sent_s: float
    first_s: float = 0.0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    citations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def route(self) -> str:
        """The route that the router has taken; ``-`` if no router answered."""
        return self.headers.get("x-ppd-route", "-")

    @property
    def reason(self) -> str:
        """The reason of that route; ``-`` if no router answered."""
        return self.headers.get("x-ppd-reason", "-")

    @property
    def ttft_ms(self) -> float:
        """The time from the request to its first text."""
        return 1e3 * (self.first_s - self.sent_s)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncOpenAI]:
    """Give a client of the server at ``url``; it never retries."""
    from openai import AsyncOpenAI

    base_url = f"{url}/v1"
    async with AsyncOpenAI(
        base_url=base_url, api_key="any", max_retries=0, timeout=_TIMEOUT_S
    ) as client:
        yield client


async def ask(client: AsyncOpenAI, messages: list[Message], max_tokens: int, **extra: Any) -> Reply:
    """Send one turn, greedy, and read its stream to the end.

    Args:
        extra: fields of the body that OpenAI's API does not have.

    Raises:
        WorkerError: the turn failed, or brought no text or no usage.
    """
    from httpx import HTTPError
    from openai import OpenAIError

    sent_s = time.perf_counter()
    try:
        async with client.chat.completions.with_streaming_response.create(
            model="default",
            messages=cast("list[ChatCompletionMessageParam]", messages),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_output_ids_in_sglext": True, **extra},
        ) as response:
            reply = Reply(response.headers, sent_s)
            usage = None
            async for chunk in await response.parse():
                usage = _take(reply, chunk) or usage
    except (OpenAIError, HTTPError) as error:  # the latter: a stream that breaks off
        raise WorkerError(f"a turn failed: {error}") from error
    if usage is None or not reply.text:
        missing = "usage" if usage is None else "text"
        raise WorkerError(f"a turn's stream brought no {missing}")
    reply.prompt_tokens = usage.prompt_tokens
    reply.completion_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    reply.cached_tokens = (details and details.cached_tokens) or 0
    return reply


def _take(reply: Reply, chunk: Any) -> Any:
    """Add a chunk of the stream to the reply; returns its usage, if it has one."""
    for choice in chunk.choices:
        if text := choice.delta.content:
            reply.first_s = reply.first_s or time.perf_counter()
            reply.text += text
    if extension := getattr(chunk, "sglext", None):  # of SGLang
        reply.ids = (extension.get("output_ids") or [[]])[0]
    if note := getattr(chunk, "retrieval", None):  # of the router
        reply.citations = note["citations"]
    return chunk.usage


@dataclass(slots=True)
class Conversation:
    """A conversation whose whole history is sent with each turn, as chat clients do.

    Attributes:
        context_tokens: of all earlier turns, prompts and replies.
    """

    client: AsyncOpenAI
    max_tokens: int
    messages: list[Message] = field(default_factory=list)
    context_tokens: int = 0

    async def ask(self, text: str, **extra: Any) -> Reply:
        """Send the next turn, and add it and its answer to the history.

        Raises:
            WorkerError: the turn failed.
        """
        self.messages.append({"role": "user", "content": text})
        reply = await ask(self.client, self.messages, self.max_tokens, **extra)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.context_tokens = reply.prompt_tokens + reply.completion_tokens
        return reply
