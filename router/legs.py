"""One upstream request ("leg"): sent, waited for until it speaks, closed again.

A leg knows its worker and the wire, not why it was sent there.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
import orjson

from ppd.errors import RequestError

from .handshake import describe
from .sse import EngineError, EventCutter, error_of, parse_event, split_events
from .workers import Worker


class Cause(StrEnum):
    """How a leg failed, which decides what may be tried next."""

    ANSWERED = "answered"  # the worker said no, or spoke nonsense
    UNCONNECTED = "unconnected"  # nothing was sent
    LOST = "lost"  # the connection broke with the request in the worker's hands
    SILENT = "silent"  # connected, but nothing came for too long


class LegFailed(Exception):
    """A leg ended before anything of it could be passed on."""

    def __init__(self, worker: Worker, error: EngineError, cause: Cause = Cause.ANSWERED) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error
        self.cause = cause

    @property
    def outcome(self) -> str:
        """In the words of ``ppd_finished``: a 4xx is the client's error."""
        return "rejected" if 400 <= self.error.status < 500 else "worker_error"


class StreamBroken(Exception):
    """A leg's stream broke off after it had spoken; the message says how."""


@dataclass(slots=True)
class Answer:
    """A leg that has spoken: the first whole events of a stream, or a whole body."""

    worker: Worker
    response: aiohttp.ClientResponse
    head: bytes
    cutter: EventCutter | None  # None: ``head`` is all there is

    async def blocks(self) -> AsyncIterator[bytes]:
        """The stream in blocks of whole events, ``head`` first.

        Raises:
            StreamBroken: the connection broke, or fell silent.
        """
        yield self.head
        if self.cutter is None:
            return
        try:
            async for data in self.response.content.iter_any():
                if block := self.cutter.feed(data):
                    yield block
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(f"lost the {self.worker.role} worker: {describe(error)}") from error


@asynccontextmanager
async def open_leg(
    client: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
) -> AsyncIterator[Answer]:
    """Post ``body`` and wait until the worker speaks.

    Leaving the context before the answer is read to its end closes the connection,
    which is how an SGLang server learns that the request shall be aborted.

    Raises:
        LegFailed: the worker is unreachable or refused, also as the first event of a stream.
        RequestError: the body is nested too deeply to be written again.
    """
    try:
        data = orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"the body cannot be forwarded: {error}") from error
    worker.in_flight += 1
    try:
        try:
            response = await client.post(
                worker.url + path,
                data=data,
                headers={**headers, "Content-Type": "application/json"},
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(worker, error) from error
        async with response:
            try:
                answer = await _head(worker, response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _failed(worker, error) from error
            finally:
                if response.status >= 500:
                    response.close()  # uvicorn closes it too, and the next request would find out
            decodes = answer.cutter is not None  # a whole answer has already been decoded
            worker.running += decodes
            try:
                yield answer
            finally:
                worker.running -= decodes
                if not response.content.at_eof():
                    response.close()
    finally:
        worker.in_flight -= 1


async def _head(worker: Worker, response: aiohttp.ClientResponse) -> Answer:
    if response.status != 200 or response.content_type != "text/event-stream":
        body = await response.read()
        error = error_of(_json(body), response.status)
        if error is None and response.status != 200:
            text = body[:500].decode(errors="replace") or response.reason or "no explanation"
            error = EngineError(response.status, text, "engine_error")
        if error is not None:
            raise LegFailed(worker, error)
        return Answer(worker, response, body, None)
    cutter = EventCutter()
    async for data in response.content.iter_any():
        block = cutter.feed(data)
        if not block:
            continue
        error = error_of(parse_event(split_events(block)[0]), response.status)
        if error is not None:
            raise LegFailed(worker, error)
        return Answer(worker, response, block, cutter)
    message = f"{worker.role} worker ended its stream before the first event"
    raise LegFailed(worker, EngineError(502, message, "worker_error"))


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _failed(worker: Worker, error: Exception) -> LegFailed:
    """What an error of the connection means."""
    status, cause = 502, Cause.LOST
    match error:
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            message = "the router has no file descriptors left"
            return LegFailed(worker, EngineError(503, message, "worker_error"))
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            cause = Cause.UNCONNECTED
        case TimeoutError():
            status, cause = 504, Cause.SILENT
    message = f"{worker.role} worker did not answer: {describe(error)}"
    return LegFailed(worker, EngineError(status, message, "worker_error"), cause)
