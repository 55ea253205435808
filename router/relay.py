"""Passing a decode worker's answer on to the client."""

from __future__ import annotations

import logging
import time

import orjson
from aiohttp import web

from .course import Course
from .ledger import Ledger
from .legs import Answer, StreamBroken
from .requests import Endpoint
from .sse import DONE, Tail, usage_of_generate, usage_of_openai

logger = logging.getLogger("ppd.router.turns")


def relay_body(course: Course, answer: Answer, ledger: Ledger) -> web.Response:
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
    return web.Response(
        body=answer.head,
        content_type=answer.response.content_type,
        headers=course.answer_headers(),
    )


async def relay_stream(
    request: web.Request, course: Course, answer: Answer, ledger: Ledger
) -> web.StreamResponse:
    """A stream, block by block; one that breaks off gets one error event and an end."""
    inbound = course.inbound
    tail = Tail(hide_usage=not inbound.asks_usage, native=inbound.endpoint is Endpoint.GENERATE)
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            **course.answer_headers(),
        }
    )
    outcome = "ok"
    try:
        await response.prepare(request)
        try:
            async for block in answer.blocks():
                passed = tail.pass_on(block)
                if tail.done and not tail.failed:
                    # Before the client sees the end, so that its next turn finds this one.
                    ledger.learn(course, answer.worker, tail.usage)
                if passed:
                    started_s = time.perf_counter()
                    await response.write(passed)
                    course.client_waits_s += time.perf_counter() - started_s
            trouble = "the decode worker ended its stream early"
            if tail.failed:
                outcome = "worker_error"
        except StreamBroken as broken:
            trouble = str(broken)
        if not tail.done:
            logger.error("truncated stream from %s: %s", answer.worker.url, trouble)
            outcome = "truncated"
            await response.write(_error_event(trouble) + DONE)
        await response.write_eof()
    except ConnectionError:  # the client hung up while we wrote
        outcome = "disconnected"
    ledger.finished(course, outcome)
    return response


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "worker_error", "param": None, "code": 502}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
