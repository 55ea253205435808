"""Strict parsing of a client's bytes into requests.

llhttp refuses what request smuggling uses: both lengths, odd transfer codings, bare line ends,
folded headers. This module also checks for one Host, no transfer codings in HTTP/1.0, and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httptools

from .request import Connection, Refusal, Request

_NO_PARSER = httptools.HttpRequestParser(object())
_SINGLE_HEADERS = ("host", "authorization", "content-type", "content-encoding")
_SMALL_BYTES = 64 * 1024  # maximum size of a body that is read before its sender is checked
_BODY_HEADERS = {"content-length", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of clients' requests and connections.

    Attributes:
        head_bytes: maximum size of a request's target and headers.
        body_bytes: maximum size of a request's body, decoded.
        request_s: limit on the arrival of a head, and on a pause within a body.
        idle_s: limit on the time between two requests of a connection.
        stall_s: limit on the time in which a client reads nothing of a response.
        linger_s: time for a client to read a last response before its connection is closed.
        connections: maximum number. A further one gets a 503 with Retry-After.
    """

    head_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    request_s: float = 30.0
    idle_s: float = 75.0
    stall_s: float = 60.0
    linger_s: float = 2.0
    connections: int = 16_384


class RequestReader:
    """The parser of one connection's requests.

    Args:
        limits: sizes of heads and bodies.
        connection: that responses are written to.
        on_request: is called with every request. Its last call may be with a refusal.
        on_expect: is called when a client waits for ``100 Continue`` to send its body.
        screen: is called with path and headers before a large body, or one of unknown size, is
            read. It returns a refusal, or None to read the body.

    Attributes:
        closed: further data is ignored.
        reading: a request has begun and is not complete.
        in_head: its head is not complete.
        began_s: when it began.
    """

    def __init__(
        self,
        limits: Limits,
        connection: Connection,
        on_request: Callable[[Request | Refusal], None],
        on_expect: Callable[[], None],
        screen: Callable[[str, Mapping[str, str]], Refusal | None],
    ) -> None:
        self.closed = self.reading = self.in_head = False
        self.began_s = 0.0
        self._limits = limits
        self._connection = connection
        self._on_request = on_request
        self._on_expect = on_expect
        self._screen = screen
        self._parser = httptools.HttpRequestParser(self)
        self._messages = 0
        self._now_s = 0.0
        self._body_bytes = 0

    def close(self) -> None:
        """Ignore further data, and break the reference cycle with the parser."""
        self.closed = True
        self._parser = _NO_PARSER

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse received data.

        Args:
            data: the next bytes of the connection.
            now_s: the time, by the loop's clock.
        """
        if self.closed:
            return
        self._now_s = now_s
        in_body, messages, body_bytes = self._in_body, self._messages, self._body_bytes
        between = not self.reading
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.closed = True  # the request is answered in HTTP/1.1; then the connection closes
        except httptools.HttpParserError as error:
            self.refuse(400, f"this is no valid HTTP request: {error}")
        begun = self._messages - messages
        if self.in_head and (not begun or (begun == 1 and between)):  # all of ``data`` is its head
            # The parser reports only complete headers; this one may never be complete.
            self._open_bytes += len(data)
            self._check_head(self._open_bytes)
        elif in_body and self._in_body and not begun:
            # The parser does not report chunk sizes and trailers.
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > self._limits.head_bytes + self._body_bytes:
                self.refuse(400, "the body is nearly all chunk sizes or trailers")

    def refuse(self, status: int, message: str) -> None:
        """Report a refusal and ignore further data; does nothing after the first call."""
        if not self.closed:
            self.closed = True
            self._on_request(Refusal(status, message))

    @property
    def _in_body(self) -> bool:
        return self.reading and not self.in_head

    # -- the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request (called by the parser)."""
        self.reading = self.in_head = True
        self.began_s = self._now_s
        self._messages += 1
        self._head_bytes = self._open_bytes = self._body_bytes = self._framing_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def on_url(self, target: bytes) -> None:
        """Store a part of the target (called by the parser)."""
        self._target += target
        self._head_bytes += len(target)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, or refuse a second one of its name (called by the parser)."""
        if not self.in_head:
            return  # a trailer: none is used
        self._head_bytes += len(name) + len(value)
        key, text = name.decode("latin-1").lower(), value.decode(errors="surrogateescape")
        before = self._headers.get(key)
        if before is None:
            self._headers[key] = text
        elif key in _SINGLE_HEADERS:
            self.refuse(400, f"{key} is given twice")
        else:
            self._headers[key] = f"{before}, {text}"

    def _check_head(self, size: int) -> None:
        if size > self._limits.head_bytes:
            self.refuse(431, f"the headers are larger than {self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        """Check the head before the body is read (called by the parser)."""
        self.in_head = False
        self._check_head(self._head_bytes)
        if self.closed:
            return
        version, headers = self._parser.get_http_version(), self._headers
        if self._parser.get_method() == b"CONNECT":
            self.refuse(400, "this is no proxy")
        elif self._parser.should_upgrade() and headers.keys() & _BODY_HEADERS:
            self.refuse(400, "no protocol is changed to here, and the parser skips the body")
        elif version not in ("1.0", "1.1"):
            self.refuse(505, f"HTTP/{version} is not served, but HTTP/1.1 is")
        elif version == "1.1" and "host" not in headers:
            self.refuse(400, "the Host header is missing")
        elif version == "1.0" and "transfer-encoding" in headers:
            self.refuse(400, "HTTP/1.0 has no Transfer-Encoding")
        elif headers.get("content-encoding", "identity") != "identity":
            self.refuse(415, f"Content-Encoding {headers['content-encoding']!a} is not read")
        elif int(headers.get("content-length", 0)) > self._limits.body_bytes:
            self._refuse_body()
        elif self._may_be_large() and (refusal := self._screened()) is not None:
            self.closed = True
            self._on_request(refusal)
        elif headers.get("expect", "").lower() == "100-continue" and version == "1.1":
            self._on_expect()

    def _may_be_large(self) -> bool:
        length = int(self._headers.get("content-length", 0))
        return length > _SMALL_BYTES or "transfer-encoding" in self._headers

    def _screened(self) -> Refusal | None:
        path = _origin_form(self._target.decode("latin-1")).partition("?")[0]
        return self._screen(path, self._headers)

    def on_body(self, data: bytes) -> None:
        """Store a part of the body (called by the parser)."""
        if self.closed:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_body()
        else:
            self._body.append(data)

    def _refuse_body(self) -> None:
        self.refuse(413, f"the body is larger than {self._limits.body_bytes} bytes")

    def on_message_complete(self) -> None:
        """Report the request (called by the parser)."""
        self.reading = False
        if self.closed:
            return
        body = self._body
        self._on_request(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                target=_origin_form(self._target.decode("latin-1")),
                headers=self._headers,
                body=body[0] if len(body) == 1 else b"".join(body),
                connection=self._connection,
                keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
                http_1_0=self._parser.get_http_version() == "1.0",
            )
        )


def _origin_form(target: str) -> str:
    """Return a target without scheme and host, which clients of a proxy send."""
    if target.startswith(("http://", "https://")):
        return "/" + target.partition("://")[2].partition("/")[2]
    return target
