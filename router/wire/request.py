"""One request of a client, and the response to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .heads import request_head, response_head

_LAST_CHUNK = b"0\r\n\r\n"


STOPPING = "the router is stopping"


class Listener(Protocol):
    """The callbacks for back-pressure of a client's connection, and for the server's stop."""

    def pause(self) -> None:
        """Stop writing: the connection's write buffer is full."""
        ...

    def resume(self) -> None:
        """Write again: the client has read enough of the write buffer."""
        ...

    def stop(self) -> None:
        """Write a final event now: the server stops and waits no longer."""
        ...


class Connection(Protocol):
    """The connection that a response is written to."""

    @property
    def stopping(self) -> bool:
        """Whether the server stops and waits no longer.

        A request cancelled now was not cancelled by its client.
        """
        ...

    def write(self, data: bytes) -> None:
        """Write bytes to the client."""
        ...

    def set_listener(self, listener: Listener | None) -> None:
        """Replace the listener for back-pressure; None removes it."""
        ...


@dataclass(slots=True)
class Refusal:
    """A response to a malformed or forbidden request; the connection is closed after it.

    Attributes:
        status: of the response.
        message: for people.
        code: machine-readable, of the response's error object.
        path: of the request; "" if it is not known.
        counted: the request is counted by its handler.
    """

    status: int
    message: str
    code: str | None = None
    path: str = ""
    counted: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {"Content-Type": "application/json"}
        return headers | {"Retry-After": "1"} if self.status == 503 else headers


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client, and the methods that write its response.

    Attributes:
        method: of the request line.
        target: path and query, as the request line has them.
        headers: by lower-case name; values of one name are joined by commas (RFC 9110, 5.3).
        body: decoded from its transfer coding.
        connection: that the response is written to.
        keep_alive: the connection serves another request after this one.
        http_1_0: the request is of HTTP/1.0; else of HTTP/1.1.
        answered: the head of the response has been written.
        ended: the response has been written as a whole, or aborted.
        path: the target without the query.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: Connection
    keep_alive: bool
    http_1_0: bool
    answered: bool = False
    ended: bool = False
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.target.partition("?")[0]

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Write a whole response."""
        self.answered = self.ended = True
        framing = f"Content-Length: {len(body)}\r\n{self._connection_line()}"
        head = response_head(status, headers, framing)
        self.connection.write(head if self.method == "HEAD" else head + body)

    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        """Write the head of a streamed response and the first bytes of its body."""
        self.answered = True
        if self.http_1_0:
            self.keep_alive = False  # the end of the connection ends the response
        framing = "" if self.http_1_0 else "Transfer-Encoding: chunked\r\n"
        head = response_head(status, headers, framing + self._connection_line())
        self.connection.write(head + self._chunk(first))

    def write(self, data: bytes) -> None:
        """Write a part of a streamed response; empty data is ignored."""
        if data:
            self.connection.write(self._chunk(data))

    def end(self) -> None:
        """End a streamed response."""
        self.ended = True
        if not self.http_1_0:
            self.connection.write(_LAST_CHUNK)

    def abort(self) -> None:
        """End a streamed response without its last chunk: the client detects the failure."""
        self.ended, self.keep_alive = True, False

    def raw(self) -> bytes:
        """Return the encoded request, with ``Connection: close``."""
        headers = {
            name: value
            for name, value in self.headers.items()
            if name not in ("connection", "transfer-encoding", "content-length", "expect")
        }
        headers |= {"connection": "close", "content-length": str(len(self.body))}
        return request_head(self.method, self.target, headers) + self.body

    def _connection_line(self) -> str:
        if not self.keep_alive:
            return "Connection: close\r\n"
        return "Connection: keep-alive\r\n" if self.http_1_0 else ""

    def _chunk(self, data: bytes) -> bytes:
        if self.http_1_0 or not data:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)
