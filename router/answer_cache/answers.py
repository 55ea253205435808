"""An answer as it is kept, as it is read off the model's, and as clients get it again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson

from ..serving.internal import ServerRequest, chunks_of, parsed
from ..serving.sse import DONE
from .question import FIELD, Question

_PLAIN = {"role", "content"}


class Answer(msgspec.Struct, frozen=True):
    """Attributes:
    usage: what it took to make it.
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
    """As the model would have, with an ``answer_cache`` object that says that it has not."""
    told = {"score": round(score, 4), "age_s": round(age_s, 1)}
    head = {
        "id": f"chatcmpl-{secrets.token_hex(16)}",
        "created": int(now_s),
        "model": question.model,
    }
    if not question.streams:
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": answer.usage}
        json = {"Content-Type": "application/json"}
        request.respond(200, orjson.dumps({**body, FIELD: told}), json)
        return
    head["object"] = "chat.completion.chunk"
    delta = {"role": "assistant", "content": answer.text}
    events = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], FIELD: told},
    ]
    if question.wants_usage:
        events.append({**head, "choices": [], "usage": answer.usage})
    stream = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events)
    headers = {"Content-Type": "text/event-stream"}
    request.start(200, headers, stream + DONE)
    request.end()


class Listening:
    """``serving.internal.ResponseWriter``: the answer as it is, listened to.

    Args:
        heard: gets it, if it is a plain one that ended by itself.
    """

    def __init__(self, request: ServerRequest, heard: Callable[[Answer], None]) -> None:
        self._request = request
        self._heard = heard
        self._parts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._plain = True
        self._stopped = False

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._request.respond(status, body, headers)
        if status == 200:
            answer = parsed(body)
            self._take(answer, "message")
            self._finish()

    def start(self, headers: Mapping[str, str]) -> None:
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        self._request.write(events)
        if self._plain:
            for chunk in chunks_of(events):
                self._take(chunk, "delta")

    def end(self) -> None:
        self._request.end()
        self._finish()

    def abort(self) -> None:
        self._request.abort()

    def _take(self, told: Mapping[str, Any], where: str) -> None:
        if "error" in told:
            self._plain = False
        if isinstance(usage := told.get("usage"), dict):
            self._usage = usage
        for choice in told.get("choices") or ():
            message = choice.get(where) or {}
            if any(value for name, value in message.items() if name not in _PLAIN):
                self._plain = False  # tool calls, reasoning, audio
            if isinstance(text := message.get("content"), str):
                self._parts.append(text)
            if (reason := choice.get("finish_reason")) is not None:
                self._stopped = reason == "stop"

    def _finish(self) -> None:
        text = "".join(self._parts)
        if self._plain and self._stopped and text:
            self._heard(Answer(text, self._usage))
