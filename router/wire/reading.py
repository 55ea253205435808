"""Requests made of a client's bytes, read strictly.

llhttp refuses what smuggling is made of (both lengths, odd transfer codings, bare line ends,
folded headers). Added here: one Host, no codings in HTTP/1.0, sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httptools

from .request import Connection, Refusal, Request

_NO_PARSER = httptools.HttpRequestParser(object())
_ONCE = ("host", "authorization", "content-type", "content-encoding")
_SMALL_BYTES = 64 * 1024  # of a body that may be read before anybody asks whose it is
_BODY_HEADERS = {"content-length", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Attributes:
        head_bytes: of a request's target and headers.
        body_bytes: of its body, decoded.
        request_s: for a head to arrive, and for a body to go on.
        idle_s: between two requests of a connection.
        stall_s: in which a client takes nothing of what is there for it.
        linger_s: for a client to read its last word before the connection is closed.
        connections: at a time; who comes then is told to come again.
    """

    head_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    request_s: float = 30.0
    idle_s: float = 75.0
    stall_s: float = 60.0
    linger_s: float = 2.0
    connections: int = 16_384


class RequestReader:
    """
    Args:
        connection: that answers are written to.
        found: gets every request, and at last maybe a refusal.
        expected: told of a client that waits for leave to send its body.
        screened: told of path and headers before a body that is large, or may become so, is
            read; gives a reason not to.

    Attributes:
        deaf: what the client sends from now on is not read.
        reading: in the midst of a request, begun at ``began_s``; ``in_head``: of its head.
    """

    def __init__(
        self,
        limits: Limits,
        connection: Connection,
        found: Callable[[Request | Refusal], None],
        expected: Callable[[], None],
        screened: Callable[[str, Mapping[str, str]], Refusal | None],
    ) -> None:
        self.deaf = self.reading = self.in_head = False
        self.began_s = 0.0
        self._limits = limits
        self._connection = connection
        self._found = found
        self._expected = expected
        self._screened = screened
        self._parser = httptools.HttpRequestParser(self)
        self._messages = 0
        self._now_s = 0.0
        self._body_bytes = 0

    def close(self) -> None:
        """The connection is gone. The parser holds us: no cycle of references shall be left."""
        self.deaf = True
        self._parser = _NO_PARSER

    def feed(self, data: bytes, now_s: float) -> None:
        if self.deaf:
            return
        self._now_s = now_s
        in_body, of, body_bytes = self._in_body, self._messages, self._body_bytes
        between = not self.reading
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.deaf = True  # the request is answered in HTTP/1.1; then the connection closes
        except httptools.HttpParserError as error:
            self.refuse(400, f"this is no valid HTTP request: {error}")
        begun = self._messages - of
        if self.in_head and (not begun or (begun == 1 and between)):  # all of ``data`` is its head
            # The parser tells of a header when it is whole: it may never be.
            self._open_bytes += len(data)
            self._check_head(self._open_bytes)
        elif in_body and self._in_body and not begun:
            # Nor does it tell of chunk sizes and trailers.
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > self._limits.head_bytes + self._body_bytes:
                self.refuse(400, "the body is nearly all chunk sizes or trailers")

    def refuse(self, status: int, message: str) -> None:
        if not self.deaf:
            self.deaf = True
            self._found(Refusal(status, message))

    @property
    def _in_body(self) -> bool:
        return self.reading and not self.in_head

    # -- the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.reading = self.in_head = True
        self.began_s = self._now_s
        self._messages += 1
        self._head_bytes = self._open_bytes = self._body_bytes = self._framing_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def on_url(self, target: bytes) -> None:
        self._target += target
        self._head_bytes += len(target)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer: nobody here asks for one
        self._head_bytes += len(name) + len(value)
        key, text = name.decode("latin-1").lower(), value.decode(errors="surrogateescape")
        before = self._headers.get(key)
        if before is None:
            self._headers[key] = text
        elif key in _ONCE:
            self.refuse(400, f"{key} is given twice")
        else:
            self._headers[key] = f"{before}, {text}"

    def _check_head(self, size: int) -> None:
        if size > self._limits.head_bytes:
            self.refuse(431, f"the headers are larger than {self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        self.in_head = False
        self._check_head(self._head_bytes)
        if self.deaf:
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
            self.refuse(400, "HTTP/1.0 knows no Transfer-Encoding")
        elif headers.get("content-encoding", "identity") != "identity":
            self.refuse(415, f"Content-Encoding {headers['content-encoding']!a} is not read")
        elif int(headers.get("content-length", 0)) > self._limits.body_bytes:
            self._refuse_body()
        elif self._may_be_large() and (refusal := self._screen()) is not None:
            self.deaf = True
            self._found(refusal)
        elif headers.get("expect", "").lower() == "100-continue" and version == "1.1":
            self._expected()

    def _may_be_large(self) -> bool:
        length = int(self._headers.get("content-length", 0))
        return length > _SMALL_BYTES or "transfer-encoding" in self._headers

    def _screen(self) -> Refusal | None:
        path = _origin_form(self._target.decode("latin-1")).partition("?")[0]
        return self._screened(path, self._headers)

    def on_body(self, data: bytes) -> None:
        if self.deaf:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_body()
        else:
            self._body.append(data)

    def _refuse_body(self) -> None:
        self.refuse(413, f"the body is larger than {self._limits.body_bytes} bytes")

    def on_message_complete(self) -> None:
        self.reading = False
        if self.deaf:
            return
        body = self._body
        self._found(
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
    """A target as most clients send it; proxies' clients put scheme and host before it."""
    if target.startswith(("http://", "https://")):
        return "/" + target.partition("://")[2].partition("/")[2]
    return target
