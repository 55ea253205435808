"""One upstream request ("leg"): sent, awaited until its first response, closed again.

A leg has a worker and a connection. It is independent of the route.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from ppd.contract import parse_refusal
from ppd.effects import Cause, Failure
from ppd.errors import EngineError

from ..wire.client import Exchange, Upstreams
from ..wire.errors import ConnectError, describe
from ..workers.sglang import error_of, is_transfer_failure, is_unpatched
from ..workers.worker import Worker
from .sse import EventCutter, parse_event, split_events


class Sink(Protocol):
    """Takes what follows the first events of a stream."""

    def block(self, block: bytes) -> None:
        """Whole events."""
        ...

    def ended(self, trouble: str | None) -> None:
        """The stream has ended.

        Args:
            trouble: how it broke off; None if it did not.
        """
        ...


@dataclass(slots=True)
class Answer:
    """The first response of a leg: the first whole events of a stream, or a whole body."""

    leg: Leg
    head: bytes
    content_type: str
    streams: bool

    @property
    def worker(self) -> Worker:
        """The worker that answers."""
        return self.leg.worker


class Leg:
    """Posts a body to a worker; reports its first response.

    Args:
        clients_key: 401 and 403 are about the client's own key, not the router's.
        on_response: called with an ``Answer``, or with why there is none, also for an error that
            is the first event of a stream. Once, and not after ``close``.
    """

    __slots__ = (
        "_body",
        "_clients_key",
        "_closed",
        "_content_type",
        "_cutter",
        "_end",
        "_exchange",
        "_failed",
        "_late",
        "_left",
        "_on_response",
        "_retry_after",
        "_sink",
        "_status",
        "_streams",
        "_wanted",
        "worker",
    )

    def __init__(
        self,
        upstreams: Upstreams,
        worker: Worker,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        clients_key: bool,
        on_response: Callable[[Answer | Failure], None],
    ) -> None:
        self.worker = worker
        # Dropped when it has been called: what it is bound to leads back here, and a request that
        # leaves a cycle behind is the garbage collector's to find.
        self._on_response: Callable[[Answer | Failure], None] | None = on_response
        self._clients_key = clients_key
        self._failed = False
        self._status = 0
        self._content_type = self._retry_after = ""
        self._body: list[bytes] = []  # of an answer that does not stream
        self._cutter: EventCutter | None = None
        self._streams: bool | None = None  # None: there was no response yet
        self._sink: Sink | None = None
        self._wanted = True  # what follows the first events is kept for a sink
        self._late: list[bytes] = []  # arrived before there was a sink
        self._end: str | bool | None = False  # False: it has not ended; None: well
        self._closed = self._left = False
        worker.in_flight += 1
        self._exchange: Exchange = upstreams.post(worker.url, path, headers, body, self)

    def set_sink(self, sink: Sink | None) -> None:
        """Send what follows the first events there; None: drop it."""
        self._sink, self._wanted = sink, sink is not None
        if sink is None:
            return
        for block in self._late:
            sink.block(block)
        if not isinstance(self._end, bool):
            sink.ended(self._end)

    def pause_reading(self) -> None:
        """Take no more from the worker for now."""
        self._exchange.pause_reading()

    def resume_reading(self) -> None:
        """Take more from the worker again."""
        self._exchange.resume_reading()

    def close(self) -> None:
        """Give up what has not ended; its closed connection makes an SGLang server abort it."""
        if self._closed:
            return
        self._closed = True
        self._sink = None
        self._exchange.close()
        self._leave()

    def _leave(self) -> None:
        """Count it no longer as in flight."""
        if not self._left:
            self._left = True
            self.worker.in_flight -= 1
            self.worker.streams -= self._streams is True

    # -- wire.client.ResponseListener ---------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the head of the response."""
        self._status = status
        self._retry_after = headers.get("retry-after", "")
        self._content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 200 and self._content_type == "text/event-stream":
            self._cutter = EventCutter()

    def body(self, data: bytes) -> None:
        """Take a part of the body."""
        if self._cutter is None:
            self._body.append(data)
        elif block := self._cutter.feed(data):
            if self._sink is not None:
                self._sink.block(block)
            elif self._streams is None and not self._failed:
                self._first_events(block)
            elif self._wanted:
                self._late.append(block)

    def ended(self) -> None:
        """Take the end of the response."""
        self._leave()
        if self._streams is not None:
            self._over(None)
        elif self._failed:
            pass
        elif self._cutter is None:
            self._whole_body(b"".join(self._body))
        else:
            message = f"{self.worker.role} worker ended its stream before the first event"
            self._fail(EngineError(message, status=502))

    def failed(self, error: Exception) -> None:
        """Take an error of the connection."""
        self._leave()
        if self._streams is None:
            self._unanswered(error)
        else:
            self._over(f"lost the {self.worker.role} worker: {describe(error)}")

    def _over(self, trouble: str | None) -> None:
        self._end = trouble
        if self._sink is not None:
            self._sink.ended(trouble)

    # -- the first response --------------------------------------------------------------

    def _first_events(self, block: bytes) -> None:
        if (error := error_in_events(block, self._status)) is not None:
            self._fail(error)
            return
        self.worker.streams += not self._left
        self._streams = True
        self._respond(Answer(self, block, self._content_type, streams=True))

    def _whole_body(self, body: bytes) -> None:
        if (error := error_in_body(body, self._status)) is not None:
            self._fail(error)
            return
        self._streams = False
        self._respond(Answer(self, body, self._content_type, streams=False))

    def _respond(self, response: Answer | Failure) -> None:
        on_response, self._on_response = self._on_response, None
        assert on_response is not None, "a leg has one first response"
        on_response(response)

    def _fail(self, error: EngineError, cause: Cause = Cause.ANSWERED) -> None:
        if self._failed:
            return
        self._failed = True
        if error.status in (401, 403) and not self._clients_key:
            message = f"{self.worker.role} worker refuses the router: {error.message}"
            error = EngineError(message, status=502)
        elif error.status == 429 and self._retry_after.isdecimal():
            error.retry_after_s = int(self._retry_after[:9])
        self._respond(failure_of(error, cause))

    def _unanswered(self, error: Exception) -> None:
        """What an error of the connection means."""
        status, cause = 502, Cause.LOST
        match error:
            case OSError(errno=errno.EMFILE | errno.ENFILE):
                self._fail(EngineError("the router has no file descriptors left", status=503))
                return
            case ConnectError():
                cause = Cause.UNCONNECTED
            case TimeoutError():
                status, cause = 504, Cause.SILENT
        message = f"{self.worker.role} worker did not answer: {describe(error)}"
        self._fail(EngineError(message, status=status), cause)


def error_in_body(body: bytes, status: int) -> EngineError | None:
    """Return the error that a whole answer is; None if it is none."""
    error = None
    if status != 200 or _may_be_error(body):
        error = error_of(_json(body), status)
    if error is None and status != 200:
        text = body[:500].decode(errors="replace") or "no explanation"
        error = EngineError(text, status=status, kind="engine_error")
    return error


def error_in_events(block: bytes, status: int) -> EngineError | None:
    """Return the error that a stream begins with; None if it begins well.

    Args:
        block: whole events, at least one.
        status: the HTTP status of the response.
    """
    if not _may_be_error(block):
        return None
    return error_of(parse_event(split_events(block)[0]), status)


def failure_of(error: EngineError, cause: Cause) -> Failure:
    """Return why a leg gave no answer, by the worker's error."""
    if error.status >= 500 and is_transfer_failure(error.message):
        cause = Cause.TRANSFER
    refusal = parse_refusal(error.message)
    return Failure(cause, error, refusal, is_unpatched(error.message))


def _may_be_error(data: bytes) -> bool:
    """Whether one of the words is there that every error with status 200 has.

    Inside a JSON string their quotes are escaped.
    """
    find = data.find  # ``in`` tries an integer first, and makes an exception of it
    return find(b'"error"') >= 0 or find(b'"detail"') >= 0 or find(b'"abort"') >= 0


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
