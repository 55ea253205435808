"""One upstream request ("leg"): sent, waited for until it speaks, closed again.

A leg knows its worker and the wire, not why it was sent there.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, assert_never

import orjson

from ..wire.client import Exchange, Upstreams
from ..wire.errors import ConnectError, describe
from ..workers.worker import Worker
from .sse import EngineError, EventCutter, error_of, parse_event, split_events

# In SGLang's errors (disaggregation/decode.py:2649, prefill.py:1120, 1185, common/conn.py:91) when
# KV did not get from one worker to the other: which of them is at fault they do not say.
_TRANSFER_MARKS = ("transfer failed", "bootstrap failed", "KVTransferError")

# One of these stands in every error with status 200. Inside a JSON string their quotes are escaped.
_ERROR_MARK = re.compile(rb'"(?:error|detail|abort)"')


class Cause(StrEnum):
    """How a leg failed, which decides what may be tried next."""

    ANSWERED = "answered"  # the worker said no, or spoke nonsense
    UNCONNECTED = "unconnected"  # nothing was sent
    LOST = "lost"  # the connection broke with the request in the worker's hands
    SILENT = "silent"  # connected, but nothing came for too long
    TRANSFER = "transfer"  # the KV did not get from the prefill worker to the decode worker


class LegFailed(Exception):
    """A leg ended before anything of it could be passed on."""

    def __init__(self, worker: Worker, error: EngineError, cause: Cause = Cause.ANSWERED) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error
        self.cause = cause

    @property
    def blames_worker(self) -> bool:
        """Not if the worker is only busy, or the client or the other worker may be at fault."""
        match self.cause:
            case Cause.ANSWERED:
                return self.error.status >= 500 and self.error.status != 503
            case Cause.TRANSFER:
                return False
            case Cause.UNCONNECTED | Cause.LOST | Cause.SILENT:
                return True
            case _:
                assert_never(self.cause)

    @property
    def outcome(self) -> str:
        """In the words of ``ppd_finished``: a 4xx is the client's error, but for 429."""
        if self.error.status == 429:
            return "overloaded"
        return "rejected" if 400 <= self.error.status < 500 else "worker_error"


class Sink(Protocol):
    """Where a stream goes on to."""

    def block(self, block: bytes) -> None:
        """Whole events."""
        ...

    def ended(self, trouble: str | None) -> None:
        """
        Args:
            trouble: how the stream broke off, if it did.
        """
        ...


@dataclass(slots=True)
class Answer:
    """A leg that has spoken: the first whole events of a stream, or a whole body."""

    leg: Leg
    head: bytes
    content_type: str
    streams: bool

    @property
    def worker(self) -> Worker:
        return self.leg.worker


class Leg:
    """Posts ``body``; tells when the worker has spoken.

    Args:
        clients_key: whether 401 and 403 are about the client's own, not the router's.
        told: gets an ``Answer``, or why there is none, also for an error that is the first event
            of a stream. Once, and not after ``close``.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        worker: Worker,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        clients_key: bool,
        told: Callable[[Answer | LegFailed], None],
    ) -> None:
        self.worker = worker
        # Forgotten when it has been told: what it closes over leads back here, and a request that
        # leaves a cycle behind is the garbage collector's to find.
        self._told: Callable[[Answer | LegFailed], None] | None = told
        self._clients_key = clients_key
        self._failed = False
        self._status = 0
        self._content_type = self._retry_after = ""
        self._body: list[bytes] = []  # of an answer that does not stream
        self._cutter: EventCutter | None = None
        self._streams: bool | None = None  # None: it has not spoken
        self._sink: Sink | None = None
        self._heeded = True
        self._late: list[bytes] = []  # spoken before anybody took it
        self._end: str | bool | None = False  # False: it has not ended; None: well
        self._closed = self._left = False
        worker.in_flight += 1
        self._exchange: Exchange = upstreams.post(worker.url, path, headers, body, self)

    def set_sink(self, sink: Sink | None) -> None:
        """What follows the first events goes there; None: nowhere."""
        self._sink, self._heeded = sink, sink is not None
        if sink is None:
            return
        for block in self._late:
            sink.block(block)
        if not isinstance(self._end, bool):
            sink.ended(self._end)

    def hold(self, held: bool) -> None:
        """The sink takes no more for now, or again."""
        self._exchange.hold(held)

    def close(self) -> None:
        """Gives up what has not ended, which is how an SGLang server learns that the request
        shall be aborted."""
        if self._closed:
            return
        self._closed = True
        self._sink = None
        self._exchange.close()
        self._leave()

    def _leave(self) -> None:
        """The worker has done with it, or shall have."""
        if not self._left:
            self._left = True
            self.worker.in_flight -= 1
            self.worker.running -= self._streams is True

    # -- wire.client.ResponseListener ---------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._retry_after = headers.get("retry-after", "")
        self._content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 200 and self._content_type == "text/event-stream":
            self._cutter = EventCutter()

    def body(self, data: bytes) -> None:
        if self._cutter is None:
            self._body.append(data)
        elif block := self._cutter.feed(data):
            if self._sink is not None:
                self._sink.block(block)
            elif self._streams is None and not self._failed:
                self._speak(block)
            elif self._heeded:
                self._late.append(block)

    def ended(self) -> None:
        self._leave()
        if self._streams is not None:
            self._over(None)
        elif self._failed:
            pass
        elif self._cutter is None:
            self._speak_whole(b"".join(self._body))
        else:
            message = f"{self.worker.role} worker ended its stream before the first event"
            self._fail(EngineError(502, message, "worker_error"))

    def failed(self, error: Exception) -> None:
        self._leave()
        if self._streams is None:
            self._unanswered(error)
        else:
            self._over(f"lost the {self.worker.role} worker: {describe(error)}")

    def _over(self, trouble: str | None) -> None:
        self._end = trouble
        if self._sink is not None:
            self._sink.ended(trouble)

    # -- what it says first -------------------------------------------------------------

    def _speak(self, block: bytes) -> None:
        if _ERROR_MARK.search(block) is not None:
            first = parse_event(split_events(block)[0])
            if (error := error_of(first, self._status)) is not None:
                self._fail(error)
                return
        self.worker.running += not self._left
        self._streams = True
        self._tell(Answer(self, block, self._content_type, streams=True))

    def _speak_whole(self, body: bytes) -> None:
        error = None
        if self._status != 200 or _ERROR_MARK.search(body) is not None:
            error = error_of(_json(body), self._status)
        if error is None and self._status != 200:
            text = body[:500].decode(errors="replace") or "no explanation"
            error = EngineError(self._status, text, "engine_error")
        if error is not None:
            self._fail(error)
            return
        self._streams = False
        self._tell(Answer(self, body, self._content_type, streams=False))

    def _tell(self, answer: Answer | LegFailed) -> None:
        told, self._told = self._told, None
        assert told is not None, "a leg tells once"
        told(answer)

    def _fail(self, error: EngineError, cause: Cause = Cause.ANSWERED) -> None:
        if not self._failed:
            self._failed = True
            if error.status in (401, 403) and not self._clients_key:
                told = f"{self.worker.role} worker refuses the router: {error.message}"
                error = EngineError(502, told, "worker_error")
            elif error.status == 429 and self._retry_after.isdecimal():
                error = replace(error, retry_after_s=int(self._retry_after[:9]))
            if error.status >= 500 and any(mark in error.message for mark in _TRANSFER_MARKS):
                cause = Cause.TRANSFER
            self._tell(LegFailed(self.worker, error, cause))

    def _unanswered(self, error: Exception) -> None:
        """What an error of the connection means."""
        status, cause = 502, Cause.LOST
        match error:
            case OSError(errno=errno.EMFILE | errno.ENFILE):
                message = "the router has no file descriptors left"
                self._fail(EngineError(503, message, "worker_error"))
                return
            case ConnectError():
                cause = Cause.UNCONNECTED
            case TimeoutError():
                status, cause = 504, Cause.SILENT
        message = f"{self.worker.role} worker did not answer: {describe(error)}"
        self._fail(EngineError(status, message, "worker_error"), cause)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
