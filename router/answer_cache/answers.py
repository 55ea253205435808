"""Answers of the cache: recorded from the model's answers, and sent in their format."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson

from ..serving.internal import ServerRequest, chunks_of, parsed
from ..serving.sse import DONE, Tail
from ..workers.sglang import stop_string_of
from .question import FIELD, Question

_TEXT_FIELDS = {"role", "content"}


class Answer(msgspec.Struct, frozen=True):
    """A model's answer to a question.

    Attributes:
        text: the reply.
        usage: the engine's usage object of the request that made it.
    """

    text: str
    usage: dict[str, Any]


def respond(
    request: ServerRequest,
    question: Question,
    answer: Answer,
    score: float,
    age_s: float,
    now_s: float,
) -> None:
    """Send a stored answer in the format of the model's, with an ``answer_cache`` object.

    Args:
        request: the client's request.
        question: the question of the request.
        answer: the stored answer.
        score: cosine of this question and the stored one.
        age_s: age of the answer.
        now_s: seconds since 1970.
    """
    cache_info = {"score": round(score, 4), "age_s": round(age_s, 1)}
    head = {
        "id": f"chatcmpl-{secrets.token_hex(16)}",
        "created": int(now_s),
        "model": question.model,
    }
    if not question.streams:
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": answer.usage}
        headers = {"Content-Type": "application/json"}
        request.respond(200, orjson.dumps({**body, FIELD: cache_info}), headers)
        return
    head["object"] = "chat.completion.chunk"
    delta = {"role": "assistant", "content": answer.text}
    stop = {"index": 0, "delta": {}, "finish_reason": "stop"}
    events = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [stop], FIELD: cache_info},
    ]
    if question.wants_usage:
        events.append({**head, "choices": [], "usage": answer.usage})
    stream = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events)
    headers = {"Content-Type": "text/event-stream"}
    request.start(200, headers, stream + DONE)
    request.end()


class RecordingWriter:
    """Sends an answer, and records its text; a ``serving.internal.ResponseWriter``.

    Args:
        request: gets the answer.
        record: called with the answer if it is text only and ended with a stop.
        hides_usage: the client has not asked for the usage at the end of the stream.
    """

    def __init__(
        self, request: ServerRequest, record: Callable[[Answer], None], *, hides_usage: bool
    ) -> None:
        self._request = request
        self._record = record
        self._tail = Tail(hide_usage=hides_usage, native=False)
        self._parts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._is_text = True
        self._stopped = False

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send and record a whole answer."""
        self._request.respond(status, body, headers)
        if status == 200:
            self._read(parsed(body), "message")
            self._finish()

    def start(self, headers: Mapping[str, str]) -> None:
        """Start a streamed answer."""
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        """Send and record whole events."""
        self._request.write(self._tail.pass_on(events))
        if self._is_text:
            for chunk in chunks_of(events):
                self._read(chunk, "delta")

    def end(self) -> None:
        """End a streamed answer, and record it."""
        self._request.end()
        self._finish()

    def abort(self) -> None:
        """Abort a streamed answer; it is not recorded."""
        self._request.abort()

    def _read(self, answer: Mapping[str, Any], key: str) -> None:
        """Read a whole answer or an event, whose choices hold their text under ``key``."""
        if "error" in answer:
            self._is_text = False
        if isinstance(usage := answer.get("usage"), dict):
            self._usage = usage
        for choice in answer.get("choices") or ():
            message = choice.get(key) or {}
            if any(value for name, value in message.items() if name not in _TEXT_FIELDS):
                self._is_text = False  # tool calls, reasoning, audio
            if isinstance(text := message.get("content"), str):
                self._parts.append(text)
            if (reason := choice.get("finish_reason")) is not None:
                self._stopped = reason == "stop" and stop_string_of(choice) is None

    def _finish(self) -> None:
        text = "".join(self._parts)
        if self._is_text and self._stopped and text:
            self._record(Answer(text, self._usage))
