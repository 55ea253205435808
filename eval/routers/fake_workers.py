"""A prefill and a decode worker that answer at once, for what a router costs.

Raw protocols in one process, so that a core serves tens of thousands of chunks a second. They
compute nothing: each request's stream has ``max_tokens`` chunks, the first at once, then one for
all streams in every step, as an engine with continuous batching has it. Run as
``python -m eval.routers.fake_workers PREFILL_PORT DECODE_PORT MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

import httptools
import uvloop

from ppd.contract import DESCRIPTION_VERSION

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
MOST = re.compile(rb'"max_(?:completion_|new_)?tokens": ?(\d+)')
STREAM = re.compile(rb'"stream": ?true')
_IDLE = {
    "max_total_num_tokens": 100_000_000,  # room for all streams of the bench
    "num_total_tokens": 0,
    "num_running_reqs": 0,
    "timestamp": 0.0,
}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Stream(Protocol):
    """One that is open."""

    def emit(self, burst: int) -> None:
        """The next chunks."""
        ...


class Steps:
    """The decode worker's steps; ``POST /rhythm`` sets how long they are.

    Attributes:
        burst: chunks of each stream in a step, each sent by itself.
    """

    def __init__(self) -> None:
        self.interval_s = 0.0
        self.burst = 1
        self.streams: set[Stream] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Stream) -> None:
        self.streams.add(stream)
        if self._timer is None:
            self._timer = self._loop.call_later(self.interval_s, self._step)

    def _step(self) -> None:
        due_s = self._loop.time() + self.interval_s
        for stream in list(self.streams):
            stream.emit(self.burst)
        self._timer = self._loop.call_at(due_s, self._step) if self.streams else None


def chunked(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def json_answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    return head % (len(body), body)


@dataclass(frozen=True, slots=True)
class Script:
    """What the workers of one model say."""

    model: str
    usage: dict[str, object]

    def event(self, delta: dict[str, str] | None, reason: str | None = None) -> bytes:
        """As SGLang's serializer writes one."""
        choices = (
            []
            if delta is None
            else [
                {
                    "index": 0,
                    "delta": delta,
                    "logprobs": None,
                    "finish_reason": reason,
                    "matched_stop": None,
                }
            ]
        )
        body = {
            "id": "9d3be3c7e6a34c1ab0c64fb7d3c5d9e2",
            "object": "chat.completion.chunk",
            "created": 1763740000,
            "model": self.model,
            "choices": choices,
            "usage": self.usage if delta is None else None,
        }
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    def whole(self) -> bytes:
        body = {
            "id": "9d3be3c7e6a34c1ab0c64fb7d3c5d9e2",
            "object": "chat.completion",
            "created": 1763740000,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " token"},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "matched_stop": None,
                }
            ],
            "usage": self.usage,
        }
        return json.dumps(body, separators=(",", ":")).encode()


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker; answers what routers ask to know whom they have before them."""

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
        """The answer to what only this program's own processes ask; None: it is not that."""
        return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target = b""
        self._parts = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        path, body = self._target.partition(b"?")[0].decode(), b"".join(self._parts)
        if path in PATHS:
            self.generate(path, body)
            return
        told = self.control(path, body)
        answer = self._about(path) if told is None else told
        self._transport.write(json_answer(json.dumps(answer).encode()))

    def _about(self, path: str) -> object:
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


class FakeWorker(WorkerConnection):
    """Answers chat requests at once, in the decode worker's steps."""

    def __init__(self, role: str, script: Script, steps: Steps) -> None:
        super().__init__(role, script.model, role)
        self._steps = steps
        self._token = chunked(script.event({"content": " token"}))
        self._tail = chunked(script.event({}, "stop"))
        self._tail += chunked(script.event(None)) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._whole = json_answer(script.whole())
        self._left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.streams.discard(self)

    def control(self, path: str, body: bytes) -> object | None:
        if path != "/rhythm":
            return None
        asked = json.loads(body)
        self._steps.interval_s, self._steps.burst = asked["interval_s"], asked["burst"]
        return {}

    def generate(self, path: str, body: bytes) -> None:
        if STREAM.search(body) is None:
            self._transport.write(self._whole)
            return
        most = MOST.search(body)
        self._left = int(most[1]) if most and self.role == "decode" else 1
        # With the first chunk, as uvicorn does when that is there.
        self._send(STREAM_HEAD + self._token)
        self._left -= 1
        if self._left:
            self._steps.add(self)
        else:
            self.emit(0)

    def emit(self, burst: int) -> None:
        """The next chunks, and the end after the last."""
        for _ in range(min(burst, self._left)):
            self._send(self._token)
            self._left -= 1
        if not self._left:
            self._transport.write(self._tail)
            self._steps.streams.discard(self)

    def _send(self, data: bytes) -> None:
        """Now, and by itself: the loop would send all that is written in one step at once."""
        sent = 0
        if not self._transport.get_write_buffer_size():
            with suppress(BlockingIOError, ConnectionError):
                sent = os.write(self._transport.get_extra_info("socket").fileno(), data)
        if sent < len(data):
            self._transport.write(data[sent:])


async def serve(prefill_port: int, decode_port: int, model: str) -> None:
    usage = {"prompt_tokens": 400, "completion_tokens": 32, "total_tokens": 432}
    script, steps = Script(model, {**usage, "prompt_tokens_details": None}), Steps()
    loop = asyncio.get_running_loop()
    for role, port in (("prefill", prefill_port), ("decode", decode_port)):
        await loop.create_server(
            lambda role=role: FakeWorker(role, script, steps),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=8192,
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
