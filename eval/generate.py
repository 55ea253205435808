"""A streaming client of ``/generate``, the endpoint of SGLang that takes token ids.

It reads the events of an answer as they come. Timing them is the caller's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

_COUNT = b'"completion_tokens":'
_DONE = b"data: [DONE]"
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        ids: token ids of the reply.
        cached_tokens: of the prompt, as the engine reports them.
        finish_reason: as the engine reports it.
    """

    ids: list[int]
    cached_tokens: int
    finish_reason: Any


@dataclass(slots=True)
class EventStream:
    """The events of one answer; only the last one is kept.

    Attributes:
        on_tokens: called for each event that brings tokens.
        status, headers: of the response; 0 before it has come.
        refusal: the beginning of the body, if the status is not 200.
        error: the first event with an error.
        tokens: how many have come.
        done: ``[DONE]`` has come.
    """

    on_tokens: Callable[[], None] = lambda: None
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    last: bytes = b""
    error: bytes = b""
    tokens: int = 0
    done: bool = False

    def take(self, line: bytes) -> None:
        """Read one line of the stream."""
        if line.startswith(_DONE):
            self.done = True
        if not line.startswith(b"data: {"):
            return
        if line.startswith(b'data: {"error"'):
            self.error = self.error or line
            return
        self.last = line
        tokens = _tokens_so_far(line)
        if tokens is not None and tokens <= self.tokens:
            return  # it brings none
        self.tokens = self.tokens + 1 if tokens is None else tokens
        self.on_tokens()

    def error_message(self) -> str | None:
        """Return the message of an error event or an aborted request, if there is one.

        Raises:
            ValueError, TypeError, AttributeError: the stream is none of ``/generate``.
        """
        last = _object(self.error or self.last)
        if "error" in last:
            return str(last["error"])
        return None

    def answer(self) -> Answer:
        """Return the whole answer, which the last event repeats.

        Raises:
            ValueError, TypeError, AttributeError: the stream is none of ``/generate``.
        """
        last = _object(self.last)
        ids = last.get("output_ids") or []
        meta = last.get("meta_info") or {}
        if not all(type(token) is int for token in ids):
            raise TypeError("output_ids must be integers")
        return Answer(ids, int(meta.get("cached_tokens") or 0), meta.get("finish_reason"))


async def generate(http: aiohttp.ClientSession, url: str, body: bytes, stream: EventStream) -> None:
    """Send a request to ``url``/generate, and read its answer into ``stream``.

    Raises:
        aiohttp.ClientError, OSError: the connection failed, or ended too early.
        TimeoutError: the session's time limits have passed.
        ValueError: a line is longer than the session's buffer.
    """
    async with http.post(f"{url}/generate", data=body, headers=_JSON) as response:
        stream.status, stream.headers = response.status, response.headers
        if response.status != 200:
            stream.refusal = (await response.text(errors="replace"))[:300]
            return
        async for line in response.content:
            stream.take(line)


def greedy_body(prompt: list[int], output_tokens: int, model: str = "") -> dict[str, Any]:
    """Return a streaming request for exactly so many tokens, of a model if one is named."""
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
    return {**body, "model": model} if model else body


def _object(line: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = orjson.loads(line[6:] or b"{}")
    return parsed


def _tokens_so_far(line: bytes) -> int | None:
    """Find the count without parsing: a reply of n tokens is n events of up to n ids."""
    at = line.rfind(_COUNT)
    if at < 0:
        return None
    at += len(_COUNT)
    end = at
    while line[end : end + 1].isdigit() or line[end : end + 1] == b" ":
        end += 1
    digits = line[at:end].strip()
    return int(digits) if digits.isdigit() else None
