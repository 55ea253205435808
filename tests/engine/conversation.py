"""A chat client for tests: one conversation, turn after turn, on any URL."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.score import Objective


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's reply.

    Attributes:
        route: of the router's decision; empty if no router was asked.
        reason: of the router's decision; empty if no router was asked.
        ids: the reply's token ids.
    """

    route: str
    reason: str
    ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the reply."""
        return self.prompt_tokens + len(self.ids)


@dataclass(slots=True)
class Conversation:
    """A conversation on one URL, whose turns alternate between streaming and not.

    Attributes:
        max_tokens: of each reply.
        extra_fields: added to each request.
        resends: whether a request that failed although the router sent it twice is sent again.
        messages: all messages so far, in OpenAI's format.
        turns: all turns so far.
    """

    http: aiohttp.ClientSession
    url: str
    max_tokens: int = 16
    extra_fields: dict[str, Any] = field(default_factory=dict)
    resends: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def send(self, text: str) -> Turn:
        """Send a user message and wait for the whole reply.

        Raises:
            AssertionError: the response is an error.
        """
        self.messages.append({"role": "user", "content": text})
        stream = len(self.turns) % 2 == 0
        body = {
            "model": "default",
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": stream,
            "return_output_ids_in_sglext": True,
            **self.extra_fields,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        url = f"{self.url}/v1/chat/completions"
        while True:
            async with self.http.post(url, json=body) as response:
                data = await response.read()
            if response.status == 200 or not self.resends:
                break
            assert response.headers.get("X-PPD-Retried") == "1", data.decode()
        assert response.status == 200, data.decode()
        turn = _read_stream(response, data) if stream else _read_body(response, data)
        self.messages.append({"role": "assistant", "content": turn.text})
        self.turns.append(turn)
        return turn

    async def send_all(self, texts: Sequence[str]) -> list[Turn]:
        """Send user messages, each after the reply to the one before; give all turns."""
        for text in texts:
            await self.send(text)
        return self.turns


def stream_events(data: bytes) -> Iterator[Any]:
    """Parse a whole stream of server-sent events, which must end with ``[DONE]``."""
    parts = data.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], data[-300:]
    for part in parts[:-2]:
        yield orjson.loads(part.partition(b"data: ")[2])


def _read_stream(response: aiohttp.ClientResponse, data: bytes) -> Turn:
    text, usage = "", None
    ids: list[int] = []
    for event in stream_events(data):
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
        ids = ((event.get("sglext") or {}).get("output_ids") or [ids])[0]
        usage = event.get("usage") or usage
    assert usage is not None
    return _turn(response, text, ids, usage)


def _read_body(response: aiohttp.ClientResponse, data: bytes) -> Turn:
    reply = orjson.loads(data)
    text = reply["choices"][0]["message"]["content"]
    return _turn(response, text, reply["sglext"]["output_ids"][0], reply["usage"])


def _turn(
    response: aiohttp.ClientResponse, text: str, ids: list[int], usage: dict[str, Any]
) -> Turn:
    return Turn(
        route=response.headers.get("X-PPD-Route", ""),
        reason=response.headers.get("X-PPD-Reason", ""),
        ids=ids,
        text=text,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
    )


def user_messages(seed: int, turns: int, first_chars: int = 600) -> list[str]:
    """Make the user's messages of one conversation: a long opening, then short ones."""
    source = random.Random(seed)

    def characters(count: int) -> str:
        return "".join(source.choices(string.ascii_letters + " .,?", k=count))

    later = (characters(source.randint(8, 120)) for _ in range(turns - 1))
    return [characters(first_chars), *later]


@dataclass(slots=True)
class RandomRoutes(Policy):
    """A policy that chooses the route of every later turn at random."""

    source: random.Random

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose either route with equal probability."""
        if self.source.random() < 0.5:
            return Decision(Route.LOCAL, Reason.POLICY_FULL)
        return Decision(Route.REMOTE, Reason.POLICY_PD)
