"""A prefill and a decode worker that answer at once, for what a router costs.

Both run in one process, on raw protocols, so that a core serves tens of thousands of chunks a
second. Each stream has ``max_tokens`` chunks. The first one is sent at once; then each step sends
one for all streams, as an engine with continuous batching does. Run as
``python -m eval.fake_worker.paced PREFILL_PORT DECODE_PORT MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from ppd.contract import LOCAL_MARKER

from .connection import (
    MAX_TOKENS,
    STREAM,
    STREAM_END,
    STREAM_HEAD,
    WorkerConnection,
    chunked,
    whole_answer,
)
from .state import IDLE_TOKENS, WorkerState

_LOCAL = f'"{LOCAL_MARKER}"'.encode()


class Steps:
    """The decode worker's steps; ``POST /rhythm`` sets their length and burst.

    Attributes:
        interval_s: from one step to the next.
        burst: chunks of each stream in a step, each sent by itself.
        streams: the connections with an open stream.
        late_s: how late each step began, since the last ``POST /slip``.
    """

    def __init__(self) -> None:
        self.interval_s = 0.0
        self.burst = 1
        self.streams: set[PacedConnection] = set()
        self.late_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def add(self, stream: PacedConnection) -> None:
        """Send the chunks of a stream in the next steps."""
        self.streams.add(stream)
        if self._timer is None:
            self._wait_until(self._loop.time() + self.interval_s)

    def _wait_until(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._step)

    def _step(self) -> None:
        now_s = self._loop.time()
        self.late_s.append(now_s - self._due_s)
        for stream in list(self.streams):
            stream.emit(self.burst)
        self._timer = None
        if self.streams:
            self._wait_until(now_s + self.interval_s)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a model's workers.

    Attributes:
        usage: the token counts of every answer.
    """

    model: str
    usage: dict[str, object]

    def event(self, delta: dict[str, str] | None, reason: str | None = None) -> bytes:
        """Return one event, as SGLang's serializer writes it.

        Args:
            delta: None for the event with the usage.
        """
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

    def whole(self, *, cached: bool = False) -> bytes:
        """Return the body of an answer that does not stream.

        Args:
            cached: the prompt was in the KV cache, as of local turns.
        """
        found = {"cached_tokens": self.usage["prompt_tokens"]} if cached else None
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
            "usage": {**self.usage, "prompt_tokens_details": found},
        }
        return json.dumps(body, separators=(",", ":")).encode()


class PacedConnection(WorkerConnection):
    """A connection that answers chat requests at once, in the decode worker's steps."""

    def __init__(self, state: WorkerState, answers: Answers, steps: Steps) -> None:
        super().__init__(state)
        self._steps = steps
        self._token = chunked(answers.event({"content": " token"}))
        self._tail = chunked(answers.event({}, "stop"))
        self._tail += chunked(answers.event(None)) + chunked(b"data: [DONE]\n\n") + STREAM_END
        self._whole = whole_answer(answers.whole())
        self._whole_of_local = whole_answer(answers.whole(cached=True))
        self._left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream that is open."""
        super().connection_lost(exc)
        self._steps.streams.discard(self)

    def control(self, path: str, body: bytes) -> object | None:
        """Set the length of steps and bursts, or report how late the steps were."""
        steps = self._steps
        if path == "/slip":
            late_s, steps.late_s = steps.late_s, []
            return {"late_s": late_s}
        if path != "/rhythm":
            return None
        asked = json.loads(body)
        steps.interval_s, steps.burst, steps.late_s = asked["interval_s"], asked["burst"], []
        return {}

    def generate(self, path: str, body: bytes) -> None:
        """Begin a stream, or send a whole answer."""
        if STREAM.search(body) is None:
            self._transport.write(self._whole_of_local if _LOCAL in body else self._whole)
            return
        tokens = MAX_TOKENS.search(body)
        self._left = int(tokens[1]) if tokens and self._state.role == "decode" else 1
        # With the first chunk, as uvicorn does when that is there.
        self._send(STREAM_HEAD + self._token)
        self._left -= 1
        if self._left:
            self._steps.add(self)
        else:
            self.emit(0)

    def emit(self, burst: int) -> None:
        """Send the next chunks, and the end after the last."""
        for _ in range(min(burst, self._left)):
            self._send(self._token)
            self._left -= 1
        if not self._left:
            self._transport.write(self._tail)
            self._steps.streams.discard(self)

    def _send(self, data: bytes) -> None:
        """Send now: the loop would send all that is written in one step together."""
        sent = 0
        if not self._transport.get_write_buffer_size():
            with suppress(BlockingIOError, ConnectionError):
                sent = os.write(self._transport.get_extra_info("socket").fileno(), data)
        if sent < len(data):
            self._transport.write(data[sent:])


async def serve(prefill_port: int, decode_port: int, model: str) -> None:
    """Serve both workers until the process ends."""
    usage = {"prompt_tokens": 400, "completion_tokens": 32, "total_tokens": 432}
    answers, steps = Answers(model, {**usage, "prompt_tokens_details": None}), Steps()
    loop = asyncio.get_running_loop()
    for role, port in (("prefill", prefill_port), ("decode", decode_port)):
        state = WorkerState(role, model=model, port=port, free_tokens=IDLE_TOKENS)
        await loop.create_server(
            lambda state=state: PacedConnection(state, answers, steps),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=8192,
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
