"""One request of a client, and the answer to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .heads import request_head, response_head

_LAST_CHUNK = b"0\r\n\r\n"


STOPPING = "the router is stopping"


class Listener(Protocol):
    """Whoever must know that a client takes no more for now."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None:
        """The server stops, and waits no longer: the last words, now."""
        ...


class Connection(Protocol):
    """What an answer is written to.

    Attributes:
        stopping: the server waits no longer: who is cancelled now was not left by its client.
    """

    @property
    def stopping(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def set_listener(self, listener: Listener | None) -> None:
        """Tell ``listener`` when the client is too slow, and when it has caught up."""
        ...


@dataclass(slots=True)
class Refusal:
    """A request that was none, or that nobody may send; the connection ends with it.

    Attributes:
        code: for programs.
        path: that was asked for, if it is known.
        counted: as a request, elsewhere.
    """

    status: int
    message: str
    code: str | None = None
    path: str = ""
    counted: bool = False

    @property
    def headers(self) -> dict[str, str]:
        told = {"Content-Type": "application/json"}
        return told | {"Retry-After": "1"} if self.status == 503 else told


@dataclass(slots=True, eq=False)
class Request:
    """
    Attributes:
        path: of the target, without the query.
        headers: by lower-case name; several of one name are joined by commas, as RFC 9110 5.3 says.
        keep_alive: the connection serves another request after this one.
        answered: a head has been written.
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
        """The whole answer at once."""
        self.answered = self.ended = True
        framing = f"Content-Length: {len(body)}\r\n{self._connection_line()}"
        head = response_head(status, headers, framing)
        self.connection.write(head if self.method == "HEAD" else head + body)

    def start(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        """The head of a streamed answer and its first bytes."""
        self.answered = True
        if self.http_1_0:
            self.keep_alive = False  # the end of the connection is the end of the answer
        framing = "" if self.http_1_0 else "Transfer-Encoding: chunked\r\n"
        head = response_head(status, headers, framing + self._connection_line())
        self.connection.write(head + self._chunk(first))

    def write(self, data: bytes) -> None:
        if data:
            self.connection.write(self._chunk(data))

    def end(self) -> None:
        """Of a streamed answer."""
        self.ended = True
        if not self.http_1_0:
            self.connection.write(_LAST_CHUNK)

    def abort(self) -> None:
        """Of a streamed answer that cannot be ended well: the client shall see that."""
        self.ended, self.keep_alive = True, False

    def raw(self) -> bytes:
        """The request again, as the last one of its connection."""
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
