"""Requests that the router makes itself, served like a client's: other APIs, samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from ..wire.request import Connection
from .sse import parse_event, split_events


class ServerRequest(Protocol):
    """A request that can be answered: ``wire.request.Request``, or an ``InternalRequest``."""

    @property
    def method(self) -> str:
        """Of HTTP."""
        ...

    @property
    def path(self) -> str:
        """Without the query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    @property
    def body(self) -> bytes:
        """The whole body."""
        ...

    @property
    def connection(self) -> Connection:
        """The client's."""
        ...

    @property
    def answered(self) -> bool:
        """Whether an answer has begun."""
        ...

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Give the whole answer."""
        ...

    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        """Give the head of a streamed answer, and its first bytes."""
        ...

    def write(self, data: bytes) -> None:
        """Give more of a streamed answer."""
        ...

    def end(self) -> None:
        """End a streamed answer."""
        ...

    def abort(self) -> None:
        """Break a streamed answer off, so that the client notices."""
        ...


class ResponseWriter(Protocol):
    """Takes the answer to an internal request."""

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """The whole answer."""
        ...

    def start(self, headers: Mapping[str, str]) -> None:
        """The head of a stream, with status 200."""
        ...

    def write(self, events: bytes) -> None:
        """Whole events of a stream."""
        ...

    def end(self) -> None:
        """The end of a stream."""
        ...

    def abort(self) -> None:
        """A stream that cannot be ended well."""
        ...


class InternalRequest:
    """A request that the router makes and serves itself; nothing of it is framed.

    Args:
        headers: by lower-case name.
        connection: of the client that it is served for.
        writer: takes the answer.
    """

    method = "POST"

    def __init__(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        connection: Connection,
        writer: ResponseWriter,
    ) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.connection = connection
        self.answered = False
        self._writer = writer

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Give the whole answer."""
        self.answered = True
        self._writer.respond(status, body, headers)

    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        """Begin a streamed answer."""
        assert status == 200
        self.answered = True
        self._writer.start(headers)
        self._writer.write(first)

    def write(self, data: bytes) -> None:
        """Give more events."""
        if data:
            self._writer.write(data)

    def end(self) -> None:
        """End a streamed answer."""
        self._writer.end()

    def abort(self) -> None:
        """Break a streamed answer off."""
        self._writer.abort()


def chunks_of(events: bytes) -> list[dict[str, Any]]:
    """The JSON of whole events; ``[DONE]`` and comments carry none."""
    parsed = map(parse_event, split_events(events))
    return [chunk for chunk in parsed if isinstance(chunk, dict)]


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON of a whole answer; {} if it is no object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
