"""Answers of chats with retrieval: the engine's answer and a report of the retrieval."""

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

    In a whole answer the object stands beside ``choices``. In a stream it is the last event.

    Args:
        request: gets the answer.
        report: the object.
    """

    def __init__(self, request: ServerRequest, report: RetrievalReport) -> None:
        self._request = request
        self._report = report
        self._added = False

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
        """Send whole events; the object is inserted before ``[DONE]``."""
        if not self._added and (at := _end_of_stream(events)) is not None:
            self._added = True
            chunk = {"object": "chat.completion.chunk", "choices": []}
            event = orjson.dumps({**chunk, "retrieval": self._report.to_json_object()})
            events = b"%bdata: %b\n\n%b" % (events[:at], event, events[at:])
        self._request.write(events)

    def end(self) -> None:
        """End a streamed answer."""
        self._request.end()

    def abort(self) -> None:
        """Abort a streamed answer."""
        self._request.abort()


def _end_of_stream(events: bytes) -> int | None:
    """The offset of ``[DONE]``; None if the events do not end the stream.

    The JSON of an event has no line break, so it cannot hold a line that looks like ``[DONE]``.
    """
    if events.startswith(_DONE):
        return 0
    at = events.rfind(b"\n" + _DONE)
    return None if at < 0 else at + 1
