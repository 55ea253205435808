"""Answers of chats with retrieval: the engine's, with what was found added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import orjson

from ..serving.internal import ServerRequest
from .memory import Citation

_DONE = b"data: [DONE]"


class Status(StrEnum):
    """What became of a turn's search."""

    OK = "ok"
    DEGRADED = "degraded"  # the deadline came first: the best until then
    REUSED = "reused"  # the same turn was asked before
    FAILED = "failed"  # answered without
    OFF = "off"  # nothing was searched for; earlier turns' passages are in the history


@dataclass(slots=True)
class Note:
    """What an answer says of its retrieval; written to until the answer ends.

    Attributes:
        found: in this turn.
        earlier: what earlier turns of the conversation had got.
    """

    status: Status
    found: Sequence[Citation] = ()
    earlier: Sequence[Citation] = ()
    took_ms: float = 0.0
    error: str = ""

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "status": self.status,
            "took_ms": round(self.took_ms, 1),
            "citations": [asdict(one) for one in (*self.earlier, *self.found)],
        }
        if self.error:
            told["error"] = self.error
        return told


class AnnotatingWriter:
    """Adds a ``retrieval`` object to an answer.

    A ``serving.internal.ResponseWriter``. In a whole answer the object stands beside ``choices``;
    in a stream it is one event of its own, the last.
    """

    def __init__(self, request: ServerRequest, note: Note) -> None:
        self._request = request
        self._note = note
        self._told = False

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        if status == 200 and body.startswith(b"{"):
            added = orjson.dumps({"retrieval": self._note.told()})
            body = b"%b,%b" % (body.rstrip()[:-1], added[1:])
        self._request.respond(status, body, headers)

    def start(self, headers: Mapping[str, str]) -> None:
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        if not self._told and (at := _end_of_stream(events)) is not None:
            self._told = True
            chunk = {"object": "chat.completion.chunk", "choices": []}
            event = orjson.dumps({**chunk, "retrieval": self._note.told()})
            events = b"%bdata: %b\n\n%b" % (events[:at], event, events[at:])
        self._request.write(events)

    def end(self) -> None:
        self._request.end()

    def abort(self) -> None:
        self._request.abort()


def _end_of_stream(events: bytes) -> int | None:
    """Where the last event begins, if it says that the stream is done. Inside of an event's JSON
    there is no line of its own that could look so."""
    if events.startswith(_DONE):
        return 0
    at = events.rfind(b"\n" + _DONE)
    return None if at < 0 else at + 1
