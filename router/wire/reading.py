"""Strict parsing of a client's bytes into requests.

llhttp refuses what request smuggling uses: both lengths, odd transfer codings, bare line ends,
folded headers. This module also checks the request line's spaces, for one valid Host, for transfer
codings, and sizes. An offered upgrade is ignored (RFC 9110, 7.8): the parser would skip the body
then, so it reads the request again without the offer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httptools

from .request import Connection, Refusal, Request

_NO_PARSER = httptools.HttpRequestParser(object())
_SINGLE_HEADERS = ("host", "authorization", "content-type", "content-encoding")
_SMALL_BYTES = 64 * 1024  # maximum size of a body that is read before its sender is checked
_HOST = re.compile(r"[\w.\-~%!$&'()*+,;=:\[\]]*", re.ASCII)  # RFC 3986, 3.2.2, and a port


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of clients' requests and connections.

    Attributes:
        head_bytes: maximum size of a request's target and headers.
        headers: maximum number of a request's headers.
        body_bytes: maximum size of a request's body, decoded.
        request_s: limit on the arrival of a head, and on a pause within a body.
        idle_s: limit on the time between two requests of a connection.
        stall_s: limit on the time in which a client reads nothing of a response.
        linger_s: time for a client to read a last response before its connection is closed.
        connections: maximum number. A further one gets a 503 with Retry-After.
    """

    head_bytes: int = 64 * 1024
    headers: int = 256
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

    __slots__ = (
        "_body",
        "_body_bytes",
        "_connection",
        "_framing_bytes",
        "_head_bytes",
        "_header_count",
        "_headers",
        "_limits",
        "_messages",
        "_now_s",
        "_offers_upgrade",
        "_on_expect",
        "_on_request",
        "_open_bytes",
        "_parser",
        "_screen",
        "_target",
        "began_s",
        "closed",
        "in_head",
        "reading",
    )

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
        self._offers_upgrade = False

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
        if between and b"  " in data[: data.find(b"\n") + 1]:
            self.refuse(400, "the request line has two spaces in a row")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :], now_s)
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

    def _ignore_upgrade(self, rest: bytes, now_s: float) -> None:
        """Read a request that offers an upgrade as one that does not.

        Args:
            rest: what follows its head.
            now_s: the time, by the loop's clock.
        """
        if self.closed:
            return
        method, version = self._parser.get_method(), self._parser.get_http_version()
        names = (name for name in self._headers if name not in ("upgrade", "http2-settings"))
        lines = "".join(
            f"{name}: {self._headers[name]}\r\n" for name in names if name != "connection"
        )
        close = b"" if self._parser.should_keep_alive() else b"Connection: close\r\n"
        head = b"%b %b HTTP/%b\r\n%b" % (method, self._target, version.encode(), close)
        self._parser = httptools.HttpRequestParser(self)
        self.feed(head + lines.encode(errors="surrogateescape") + b"\r\n" + rest, now_s)

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
        self._header_count = 0
        self._offers_upgrade = False
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
        self._header_count += 1
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
        if self._header_count > self._limits.headers:
            self.refuse(431, f"there are more than {self._limits.headers} headers")
        if self.closed:
            return
        version, headers = self._parser.get_http_version(), self._headers
        if self._parser.get_method() == b"CONNECT":
            self.refuse(400, "this is no proxy")
        elif self._parser.should_upgrade():
            self._offers_upgrade = True  # the parser stops here
        elif version not in ("1.0", "1.1"):
            self.refuse(505, f"HTTP/{version} is not served, but HTTP/1.1 is")
        elif version == "1.1" and "host" not in headers:
            self.refuse(400, "the Host header is missing")
        elif _HOST.fullmatch(headers.get("host", "")) is None:
            self.refuse(400, f"Host {headers['host']!a} is no host")
        elif version == "1.0" and "transfer-encoding" in headers:
            self.refuse(400, "HTTP/1.0 has no Transfer-Encoding")
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self.refuse(501, f"Transfer-Encoding {headers['transfer-encoding']!a} is not read")
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
        if self._offers_upgrade:
            return  # it is read again
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
                keep_alive=self._parser.should_keep_alive(),
                http_1_0=self._parser.get_http_version() == "1.0",
            )
        )


def _origin_form(target: str) -> str:
    """Return a target without scheme and host, which clients of a proxy send."""
    if target.startswith(("http://", "https://")):
        return "/" + target.partition("://")[2].partition("/")[2]
    return target
