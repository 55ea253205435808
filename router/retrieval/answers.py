"""Answers of chats with retrieval: the engine's answer and a report of the retrieval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import orjson

from ..serving.internal import ServerRequest, chunks_of
from ..serving.sse import parse_event, split_events
from .memory import Citation

_DONE = b"data: [DONE]"
_USAGE = re.compile(rb'"usage": ?\{')  # spares the parsing of other events
_HEAD = ("id", "created", "model")


class Status(StrEnum):
    """The outcome of a turn's search.

    Attributes:
        OK: the search was completed.
        DEGRADED: the deadline ended the search; its best passages until then are used.
        REUSED: the turn was searched for before, and has the same passages.
        FAILED: the search failed, and the turn is served without passages.
        OFF: nothing was searched for; earlier turns' passages are in the history.
    """

    OK = "ok"
    DEGRADED = "degraded"
    REUSED = "reused"
    FAILED = "failed"
    OFF = "off"


@dataclass(slots=True)
class RetrievalReport:
    """The ``retrieval`` object of an answer; it is completed while the turn is served.

    Attributes:
        status: outcome of the search.
        new: passages of this turn.
        earlier: passages of earlier turns of the conversation.
        took_ms: time of the search.
        error: why the search failed; "" if it did not.
    """

    status: Status
    new: Sequence[Citation] = ()
    earlier: Sequence[Citation] = ()
    took_ms: float = 0.0
    error: str = ""

    def to_json_object(self) -> dict[str, Any]:
        """The report as plain values."""
        fields: dict[str, Any] = {
            "status": self.status,
            "took_ms": round(self.took_ms, 1),
            "citations": [asdict(citation) for citation in (*self.earlier, *self.new)],
        }
        if self.error:
            fields["error"] = self.error
        return fields


class AnnotatingWriter:
    """Adds a ``retrieval`` object to an answer; a ``serving.internal.ResponseWriter``.

    In a whole answer the object stands beside ``choices``. In a stream it is an event of its own,
    in front of the usage and ``[DONE]``: OpenAI's helpers take the usage of the last event.

    Args:
        request: gets the answer.
        report: the object.
    """

    def __init__(self, request: ServerRequest, report: RetrievalReport) -> None:
        self._request = request
        self._report = report
        self._added = False
        self._head: dict[str, Any] = {}  # what all events of the stream have

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole answer; the object is added if the status is 200."""
        if status == 200 and body.startswith(b"{"):
            added = orjson.dumps({"retrieval": self._report.to_json_object()})
            body = b"%b,%b" % (body.rstrip()[:-1], added[1:])
        self._request.respond(status, body, headers)

    def start(self, headers: Mapping[str, str]) -> None:
        """Start a streamed answer."""
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        """Send whole events; the object is inserted before the usage, or before ``[DONE]``."""
        self._head = self._head or _head_of(events)
        if not self._added and (at := _end_of_choices(events)) is not None:
            self._added = True
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
            event = orjson.dumps({**chunk, "retrieval": self._report.to_json_object()})
            events = b"%bdata: %b\n\n%b" % (events[:at], event, events[at:])
        self._request.write(events)

    def end(self) -> None:
        """End a streamed answer."""
        self._request.end()

    def abort(self) -> None:
        """Abort a streamed answer."""
        self._request.abort()


def _head_of(events: bytes) -> dict[str, Any]:
    """The fields that name a stream, from its first event."""
    for chunk in chunks_of(events):
        if "choices" in chunk:
            return {name: chunk[name] for name in _HEAD if name in chunk}
    return {}


def _end_of_choices(events: bytes) -> int | None:
    """The offset of the usage or of ``[DONE]``; None if more choices may follow.

    The JSON of an event has no line break, so it cannot hold a line that looks like ``[DONE]``.
    """
    at = 0
    for event in split_events(events):
        if event.startswith(_DONE) or (_USAGE.search(event) and _is_usage(event)):
            return at
        at += len(event)
    return None


def _is_usage(event: bytes) -> bool:
    chunk = parse_event(event)
    return isinstance(chunk, dict) and chunk.get("choices") == [] and bool(chunk.get("usage"))
