"""Answers of the three endpoints, as SGLang writes them and as a client reads them.

Word ``i`` of request ``n`` is ``" n.i"``. So each word shows which request it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
DONE = b"data: [DONE]\n\n"
WORKER = "answered_by"


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of an answer."""

    prompt: int
    completion: int
    cached: int

    def usage(self) -> dict[str, object]:
        """Return the counts as OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached} if self.cached else None,
        }


def word(number: int, i: int) -> str:
    """Return word ``i`` of a request's answer."""
    return f" {number}.{i}"


def text_of(number: int, words: int) -> str:
    """Return the whole text of a request's answer."""
    return "".join(word(number, i) for i in range(words))


def event(value: object) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(value)


def stream_events(
    path: str, number: int, counts: Counts, worker: int, start: int = 0
) -> list[bytes]:
    """One event a word, with all that ends the stream behind the last.

    Args:
        worker: its name, in the first event.
        start: the first word; those before it stand in the prompt.
    """
    words = counts.completion
    if path == GENERATE:
        events = [
            event(
                _native(number, Counts(counts.prompt, i + 1, counts.cached), i + 1 == words)
                | ({WORKER: worker} if i == 0 else {})
            )
            for i in range(words)
        ]
    else:
        deltas = [_choice(path, word(number, start + i)) for i in range(words)]
        events = [event({"choices": [delta]}) for delta in deltas]
        events[0] = event({"choices": [deltas[0]], WORKER: worker})
        events[-1] += event({"choices": [], "usage": counts.usage()})
    events[-1] += DONE
    return events


def whole_answer(path: str, number: int, counts: Counts, worker: int) -> dict[str, Any]:
    """Return the body of an answer that does not stream."""
    if path == GENERATE:
        return {**_native(number, counts, True), WORKER: worker}
    text = text_of(number, counts.completion)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path == CHAT:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {"choices": [choice], "usage": counts.usage(), WORKER: worker}


def _choice(path: str, text: str) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}} if path == CHAT else {"index": 0, "text": text}


def _native(number: int, counts: Counts, last: bool) -> dict[str, Any]:
    """``/generate`` repeats the text so far in every event."""
    return {
        "text": text_of(number, counts.completion),
        "output_ids": [(number + i) % 256 for i in range(counts.completion)],
        "meta_info": {
            "finish_reason": {"type": "stop"} if last else None,
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "cached_tokens": counts.cached,
        },
    }


def error_event(message: str, status: int) -> bytes:
    """Return an event with an error, as SGLang writes it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return event({"error": error})


def error_answer(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error, as SGLang writes it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def split_events(body: bytes) -> list[bytes]:
    """The data of each event; half of one at the end is left out."""
    return [part.removeprefix(b"data: ") for part in body.split(b"\n\n")[:-1] if part]


def error_in(value: object) -> Mapping[str, Any] | None:
    """The error object that an answer or event carries, if it is one."""
    if not isinstance(value, dict):
        return None
    nested = value.get("error")
    error = nested if isinstance(nested, dict) else value
    return error if nested or value.get("object") == "error" else None


def text_in(path: str, values: Sequence[Any]) -> str:
    """The text of a stream's events, or of a whole answer in a list of one."""
    if path == GENERATE:
        return str(values[-1].get("text", "")) if values else ""
    parts: list[str] = []
    for value in values:
        for choice in value.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {}
            parts.append(str(part.get("content") or choice.get("text") or ""))
    return "".join(parts)
