"""Continues a stream: on another worker when its own was lost, or behind a retrieved passage.

What the client was sent is prefilled behind the prompt as the beginning of the reply, and the new
stream is passed on as the rest of the old one. Only where that gives the same kind of reply: one
choice, of text, that no grammar shapes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from ..intake.inbound import Endpoint, Inbound
from .sse import parse_event, split_events

# With these an engine needs more of the tokens so far than their text.
_SHAPED = (
    "response_format",
    "regex",
    "ebnf",
    "json_schema",
    "tools",
    "echo",
    "suffix",
    "input_ids",
)
_LIMITS = ("max_tokens", "max_completion_tokens")
# Of a request that is sent for its KV alone.
_UNWANTED = (*_LIMITS, "min_tokens", "stream_options", "logprobs", "top_logprobs")

Insertion = tuple[
    int, str
]  # what a model reads in the midst of its reply, after how many characters


class Resumption:
    """What a client was sent of one stream, and the request for the rest."""

    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._blocks: list[bytes] = []
        self._sent_tokens = 0
        self._first: dict[str, Any] = {}  # what all chunks of a stream have in common
        self._begins = False  # the next chunk is the first one of a new stream
        self._appended: list[Insertion] = []

    @staticmethod
    def possible(inbound: Inbound) -> bool:
        """Whether a stream of this request could be continued."""
        fields = inbound.fields
        if not inbound.stream or any(fields.get(name) for name in _SHAPED):
            return False
        if inbound.endpoint is Endpoint.COMPLETIONS:  # whose logprobs count characters
            return isinstance(fields.get("prompt"), str) and not fields.get("logprobs")
        return inbound.endpoint is Endpoint.CHAT and _continuable(fields["messages"][-1])

    def sent(self, block: bytes) -> None:
        """Keep what the client was sent."""
        self._blocks.append(block)

    @property
    def appended(self) -> tuple[Insertion, ...]:
        """The passages that the model has read in its reply, in order."""
        return tuple(self._appended)

    def primer(self, more: str) -> tuple[Inbound, Insertion] | None:
        """The request that prefills the reply so far, and ``more`` behind it.

        Returns:
            The request, and ``more`` with its place; None where the reply could not go on.
        """
        so_far = self._so_far()
        if so_far is None or self._rest_of(so_far[1]) is None:
            return None
        insertion = len(so_far[0]), more
        fields = {k: v for k, v in self._inbound.fields.items() if k not in _UNWANTED}
        fields |= {"max_tokens": 1, "stream": False}
        _append(
            self._inbound.endpoint, fields, with_appended(so_far[0], [*self._appended, insertion])
        )
        return self._asking(fields, stream=False), insertion

    def take_back(self) -> None:
        """Drop the last passage: the model has not read it."""
        self._appended.pop()

    def continued(self, insertion: Insertion | None = None) -> Inbound | None:
        """The request for the rest; None if there is none, or it would not be the same reply.

        Args:
            insertion: read by the model from now on, not by the client.
        """
        so_far = self._so_far()
        if so_far is None:
            return None
        text, tokens = so_far
        fields = self._rest_of(tokens)
        if fields is None:
            return None
        self._sent_tokens, self._begins = tokens, True
        if insertion is not None:
            self._appended.append(insertion)
        if read := with_appended(text, self._appended):
            _append(self._inbound.endpoint, fields, read)
        return self._asking(fields, stream=True)

    def _so_far(self) -> tuple[str, int] | None:
        """Text and tokens so far; None if they fit no prompt, or the reply is complete.

        Each chunk with text counts as one token, as SGLang sends them; where it has put several
        into one, limits on the reply are that much too long, and so is the prompt in its usage.
        """
        text, tokens = "", 0
        for chunk in _chunks(b"".join(self._blocks)):
            self._first = self._first or chunk
            for choice in chunk.get("choices") or ():
                piece = _text_of(choice)
                if piece is None or choice.get("finish_reason"):
                    return None
                text += piece
                tokens += bool(piece)
        return text, tokens

    def _rest_of(self, tokens: int) -> dict[str, Any] | None:
        """The request's fields with what is left of its limits; None: nothing is."""
        fields = dict(self._inbound.fields)
        if self._inbound.endpoint is Endpoint.COMPLETIONS:  # which has a default
            fields["max_tokens"] = self._inbound.max_reply_tokens
        for name in _LIMITS:
            if isinstance(limit := fields.get(name), int):
                if limit <= tokens:
                    return None
                fields[name] = limit - tokens
        if isinstance(least := fields.get("min_tokens"), int):
            fields["min_tokens"] = max(0, least - tokens)
        return fields

    def _asking(self, fields: dict[str, Any], *, stream: bool) -> Inbound:
        if isinstance(rid := fields.get("rid"), str):
            # The one before may still be aborted, and SGLang aborts all whose names begin so.
            fields["rid"] = f"{secrets.token_hex(8)}.{rid}"
        opened = orjson.dumps(fields)[:-1]
        return msgspec.structs.replace(self._inbound, fields=fields, opened=opened, stream=stream)

    def as_rest(self, block: bytes) -> bytes:
        """Events of the new stream, as those of the old one."""
        return b"".join(map(self._as_rest, split_events(block)))

    def _as_rest(self, event: bytes) -> bytes:
        chunk = parse_event(event)
        if not isinstance(chunk, dict) or "choices" not in chunk:
            return event
        for name in ("id", "created"):
            if name in self._first:
                chunk[name] = self._first[name]
        choices = chunk["choices"]
        if self._begins and choices and self._blocks:
            self._begins = False
            delta = choices[0].get("delta")
            if delta is not None and "role" in delta:
                del delta["role"]
                if not (delta.get("content") or choices[0].get("finish_reason")):
                    return b""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            prompt = max(0, usage.get("prompt_tokens", 0) - self._sent_tokens)
            usage["prompt_tokens"] = prompt
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):  # some of the reply so far was cached, too
                details["cached_tokens"] = min(prompt, details.get("cached_tokens") or 0)
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._sent_tokens
        return b"data: %b\n\n" % orjson.dumps(chunk)


def with_appended(text: str, appended: Iterable[Insertion]) -> str:
    """A reply as its model read it; ``appended`` in order."""
    parts: list[str] = []
    at = 0
    for end, more in appended:
        parts += (text[at:end], more)
        at = end
    return "".join((*parts, text[at:]))


def _chunks(blocks: bytes) -> Iterator[dict[str, Any]]:
    for event in split_events(blocks):
        chunk = parse_event(event)
        if isinstance(chunk, dict):
            yield chunk


def _text_of(choice: dict[str, Any]) -> str | None:
    """None: it holds something that cannot be put into a prompt."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    if delta.get("tool_calls") or delta.get("reasoning_content"):
        return None
    return delta.get("content") or ""


def _continuable(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant" or isinstance(message.get("content"), str)


def _append(endpoint: Endpoint, fields: dict[str, Any], text: str) -> None:
    if endpoint is Endpoint.COMPLETIONS:
        fields["prompt"] += text
        return
    *earlier, last = fields["messages"]
    if last["role"] == "assistant" and fields.get("continue_final_message"):
        fields["messages"] = [*earlier, {**last, "content": last["content"] + text}]
    else:
        fields["messages"] = [*earlier, last, {"role": "assistant", "content": text}]
    fields["continue_final_message"] = True
