"""One connection to a fake worker: HTTP, and the answers that describe the worker."""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

import httptools

from ppd.contract import DESCRIPTION_VERSION

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
MAX_TOKENS = re.compile(rb'"max_(?:completion_|new_)?tokens": ?(\d+)')
STREAM = re.compile(rb'"stream": ?true')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_IDLE = {
    "max_total_num_tokens": 100_000_000,  # room for all streams of a bench
    "num_total_tokens": 0,
    "num_running_reqs": 0,
    "timestamp": 0.0,
}


def chunked(event: bytes) -> bytes:
    """Frame bytes as one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def json_answer(body: bytes, status: int = 200) -> bytes:
    """Return a whole HTTP answer with a JSON body."""
    head = b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    return head % (status, len(body), body)


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker; it answers all that routers ask about the worker.

    Subclasses answer generation requests.
    """

    def __init__(self, role: str, model: str, boot_id: str, bootstrap_port: int = 8998) -> None:
        self.role = role
        self._bootstrap_port = bootstrap_port
        self._model = model
        self._boot_id = boot_id
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

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Forget the request before."""
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
            return
        answer = self.control(path, body)
        if answer is None:
            answer = self._description(path)
        self._transport.write(json_answer(json.dumps(answer).encode()))

    def _description(self, path: str) -> object:
        model = self._model
        if path == "/v1/models":
            card = {"id": model, "object": "model", "owned_by": "sglang", "max_model_len": 32768}
            return {"object": "list", "data": [card]}
        plugin = {
            "version": DESCRIPTION_VERSION,
            "local_prefill": True,
            "boot_id": self._boot_id,
            "vocab_size": 256,
        }
        return {
            "model_path": model,
            "served_model_name": model,
            "tokenizer_path": model,
            "is_generation": True,
            "disaggregation_mode": self.role,
            "disaggregation_bootstrap_port": self._bootstrap_port,
            "page_size": 16,
            "version": "0.5.21",
            "internal_states": [{"ppd": plugin} if self.role == "decode" else {}],
            "loads": [_IDLE],
        }
