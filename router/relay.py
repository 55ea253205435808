"""Passing a decode worker's answer on to the client."""

from __future__ import annotations

import asyncio
import logging
import time

import orjson

from .answers import ErrorAnswer
from .course import Course
from .ledger import Ledger
from .legs import Answer
from .requests import Endpoint
from .sse import DONE, Tail, usage_of_generate, usage_of_openai
from .wire.request import Request

logger = logging.getLogger("ppd.router.turns")

_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def relay_body(request: Request, course: Course, answer: Answer, ledger: Ledger) -> None:
    """A whole answer, as the worker gave it."""
    try:
        parsed = orjson.loads(answer.head)
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict):
        native = course.inbound.endpoint is Endpoint.GENERATE
        usage = usage_of_generate(parsed) if native else usage_of_openai(parsed)
        ledger.learn(course, answer.worker, usage)
    ledger.finished(course, "ok")
    headers = {"Content-Type": answer.content_type, **course.answer_headers()}
    request.respond(200, answer.head, headers)


async def relay_stream(request: Request, course: Course, answer: Answer, ledger: Ledger) -> None:
    """A stream, block by block; one that breaks off gets one error event and an end."""
    relay = _Relay(request, course, answer, ledger)
    request.connection.heed(relay)
    answer.leg.pour_into(relay)
    outcome = await relay.outcome
    ledger.finished(course, outcome)
    request.end()


class _Relay:
    """``legs.Sink`` of the worker's stream, ``wire.request.Listener`` of the client."""

    def __init__(self, request: Request, course: Course, answer: Answer, ledger: Ledger) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._request = request
        self._course = course
        self._leg = answer.leg
        self._ledger = ledger
        self._waits_since_s: float | None = None
        inbound = course.inbound
        self._tail = Tail(
            hide_usage=not inbound.asks_usage, native=inbound.endpoint is Endpoint.GENERATE
        )
        headers = {**_EVENT_STREAM, **course.answer_headers()}
        request.start(200, headers, self._pass_on(answer.head))

    def block(self, block: bytes) -> None:
        try:
            self._request.write(self._pass_on(block))
        except Exception as error:  # noqa: BLE001 - of ours: it must not pass for the worker's
            if not self.outcome.done():
                self.outcome.set_exception(error)

    def _pass_on(self, block: bytes) -> bytes:
        tail = self._tail
        passed = tail.pass_on(block)
        if tail.done and not tail.failed:
            # Before the client sees the end, so that its next turn finds this one.
            self._note_wait()
            self._ledger.learn(self._course, self._leg.worker, tail.usage)
        return passed

    def ended(self, trouble: str | None) -> None:
        self._note_wait()
        if self.outcome.done():  # cancelled, with whoever waited for it
            return
        if self._tail.done:
            self.outcome.set_result("worker_error" if self._tail.failed else "ok")
            return
        self._tail.breaks_off()
        if self._tail.failed:  # the client knows; a second error would be one too many
            self._request.write(DONE)
            self.outcome.set_result("worker_error")
            return
        trouble = trouble or "the decode worker ended its stream early"
        logger.error("truncated stream from %s: %s", self._leg.worker.url, trouble)
        told = ErrorAnswer(502, trouble, "worker_error", code=502)
        self._request.write(told.event + DONE)
        self.outcome.set_result("truncated")

    def pause(self) -> None:
        self._waits_since_s = time.perf_counter()
        self._leg.hold(True)

    def resume(self) -> None:
        self._note_wait()
        self._leg.hold(False)

    def _note_wait(self) -> None:
        """Time in which the client took nothing is not the worker's."""
        if self._waits_since_s is not None:
            self._course.client_waits_s += time.perf_counter() - self._waits_since_s
            self._waits_since_s = None
