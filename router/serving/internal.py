"""Requests of our own, served like a client's: what other APIs are translated to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from ..wire.request import Connection
from .sse import parse_event, split_events


class Asked(Protocol):
    """A request that can be answered (``wire.request.Request``, or one of ours)."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def connection(self) -> Connection: ...
    @property
    def answered(self) -> bool: ...

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None: ...
    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...


class Taker(Protocol):
    """Where the answer to one of our requests goes."""

    def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None: ...

    def begun(self, headers: Mapping[str, str]) -> None:
        """A stream, with status 200."""
        ...

    def block(self, events: bytes) -> None:
        """Whole events."""
        ...

    def ended(self) -> None: ...

    def aborted(self) -> None: ...


class InternalRequest:
    """``wire.request.Request`` for a request of ours; nothing is framed."""

    method = "POST"

    def __init__(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        connection: Connection,
        taker: Taker,
    ) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.connection = connection
        self.answered = False
        self._taker = taker

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.answered = True
        self._taker.whole(status, body, headers)

    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        assert status == 200
        self.answered = True
        self._taker.begun(headers)
        self._taker.block(first)

    def write(self, data: bytes) -> None:
        if data:
            self._taker.block(data)

    def end(self) -> None:
        self._taker.ended()

    def abort(self) -> None:
        self._taker.aborted()


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
