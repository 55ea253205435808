"""One connection to a fake worker: HTTP, and the answers that describe the worker."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import cast

import httptools

from .state import WorkerState

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings", "/v1/rerank"),
    *("/v1/score", "/classify", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
)
MAX_TOKENS = re.compile(rb'"max_(?:completion_|new_)?tokens": ?(\d+)')
STREAM = re.compile(rb'"stream": ?true')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"
_PROBES = ("/ready", "/health", "/flush_cache")


def chunked(event: bytes) -> bytes:
    """Frame bytes as one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def whole_answer(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a whole HTTP answer; its body is JSON unless the headers name another type."""
    every = {"content-type": "application/json", **(headers or {}), "content-length": len(body)}
    fields = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    return b"HTTP/1.1 %d -\r\n%b\r\n%b" % (status, fields.encode(), body)


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker; it answers all that routers request about the worker.

    Subclasses answer generation requests.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._parts: list[bytes] = []

    def generate(self, path: str, body: bytes) -> None:
        """Answer a generation request."""
        raise NotImplementedError

    def control(self, path: str, body: bytes) -> object | None:
        """Return the answer to a request of the bench itself; None if it is no such request."""
        return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the parser, which refers back to the connection."""
        del self._parser

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Discard the parts of the previous request."""
        self._target = b""
        self._parts = []

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._target += url

    def on_body(self, data: bytes) -> None:
        """Collect the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Answer the request."""
        path, body = self._target.partition(b"?")[0].decode(), b"".join(self._parts)
        if path in PATHS:
            self.generate(path, body)
        elif path in _PROBES:
            self._answer_probe()
        elif path == "/v1/loads":
            self._answer_load()
        elif path == "/v1/models":
            self._answer(self._state.models())
        else:
            answer = self.control(path, body)
            self._answer(self._state.server_info() if answer is None else answer)

    def _answer_probe(self) -> None:
        if self._state.probes_hang:
            self._state.probed.set()
        else:
            self._answer({}, 200 if self._state.ready else 503)

    def _answer_load(self) -> None:
        self._state.load_requested.set()
        if self._state.loads_fail:
            self._transport.abort()
            return
        loads = self._state.loads()
        self._answer({} if loads is None else {"loads": loads}, 404 if loads is None else 200)

    def _answer(self, value: object, status: int = 200) -> None:
        self._transport.write(whole_answer(json.dumps(value).encode(), status))
