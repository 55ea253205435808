"""A fake worker that fails in one of the ways in which workers and networks fail.

``FakeWorker.fault`` selects the way. A request may select it, too: its ``user`` field may name a
fault for each role (``"decode=resets"``). Several workers fit into one process. With
:class:`eval.fake_worker.kv.KvState` a worker also holds KV as an engine does.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from ppd.contract import LOCAL_MARKER

from ..dialects import DONE, Counts, error_answer, error_event, stream_events, whole_answer
from .connection import (
    MAX_TOKENS,
    STREAM,
    STREAM_HEAD,
    WorkerConnection,
    chunked,
    json_answer,
)
from .fault import WITH_KV, Behaviour, Fault, Leg
from .kv import KvState

_USER = re.compile(rb'"user": ?"([^"]*)"')
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
_REMEMBERED = 1000  # legs
FLAP = "/flap"


class FakeWorker:
    """A worker on a port of its own, in this process.

    Args:
        kv: the KV that it holds; None: it holds none, and never refuses a local turn.

    Attributes:
        fault: how it answers requests that name no fault.
        boot_id: changes with each restart.
        legs: the last requests.
        connections: those that are open.
    """

    def __init__(
        self,
        role: str,
        model: str,
        behaviour: Behaviour | None = None,
        kv: KvState | None = None,
    ) -> None:
        self.role = role
        self.model = model
        self.behaviour = behaviour or Behaviour()
        self.fault = Fault.NONE
        self.boot_id = uuid.uuid4().hex
        self.legs: deque[Leg] = deque(maxlen=_REMEMBERED)
        self.connections: set[FakeConnection] = set()
        self.port = 0
        self._kv = kv
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL of the worker."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bootstrap_port(self) -> int:
        """The port that prefill workers announce for transfers."""
        return self.port

    async def listen(self, port: int = 0) -> None:
        """Serve on a port; without one, on the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FakeConnection(self), "127.0.0.1", port or self.port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def vanish(self) -> None:
        """Break all connections and refuse new ones, as when the process dies."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.reset()

    async def close(self) -> None:
        """Stop serving, and wait until all connections have ended."""
        connections = list(self.connections)
        self.vanish()
        await asyncio.gather(*(connection.lost.wait() for connection in connections))

    async def restart(self) -> None:
        """Serve again, as another process would."""
        self.boot_id = uuid.uuid4().hex
        await self.listen()

    def fault_of(self, user: str) -> Fault:
        """Return the fault that a request's ``user`` field names, else the worker's own."""
        for word in user.split():
            role, _, name = word.partition("=")
            if role == self.role:
                return Fault(name)
        return self.fault

    def counts(self, user: str, path: str, body: bytes) -> Counts | str:
        """Return the token counts of the answer, or the message of a refusal."""
        if self._kv is not None:
            return self._kv.counts(user.split()[1], body, words_of(body))
        prompt = 100 + len(body) // 4
        return Counts(prompt, words_of(body), prompt if LOCAL_MARKER.encode() in body else 0)

    def when_ready(self, fault: Fault, body: bytes, answer: Callable[[], None]) -> None:
        """Call ``answer`` when the KV of the request is there."""
        if self._kv is None:
            answer()
        else:
            self._kv.when_ready(self.role, fault in WITH_KV, body, answer)

    def flap(self, down_s: float) -> None:
        """Cut the worker off from the network for a while; its state is kept."""
        loop = asyncio.get_running_loop()
        self.vanish()
        loop.call_later(down_s, lambda: loop.create_task(self.listen()))


@dataclass(slots=True)
class _Answering:
    """A request whose answer has not ended."""

    leg: Leg
    path: str
    user: str
    fault: Fault
    stream: bool
    timer: asyncio.TimerHandle | None = None
    events: deque[bytes] = field(default_factory=deque)


class FakeConnection(WorkerConnection):
    """One connection to a :class:`FakeWorker`.

    Attributes:
        lost: set when it has ended.
    """

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker.role, worker.model, worker.boot_id, worker.bootstrap_port)
        self.lost = asyncio.Event()
        self._worker = worker
        self._now: _Answering | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        super().connection_made(transport)
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the request under way was given up."""
        self._worker.connections.discard(self)
        self.lost.set()
        if self._now is not None:
            self._now.leg.given_up_s = time.monotonic()
            self._over()

    def reset(self) -> None:
        """Reset the connection, as a network or a dying process does."""
        if self._transport.is_closing():
            return
        link = self._transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._over()
        self._transport.abort()

    def control(self, path: str, body: bytes) -> object | None:
        """Take the order to cut the worker off from the network."""
        if path != FLAP:
            return None
        # Not now: this connection, too, is one of those that break.
        self._loop.call_later(0.01, self._worker.flap, orjson.loads(body)["down_s"])
        return {}

    def generate(self, path: str, body: bytes) -> None:
        """Answer a generation request, or fail as it or the worker demands."""
        named = _USER.search(body)
        user = named[1].decode() if named else ""
        leg = Leg(body, time.monotonic())
        self._worker.legs.append(leg)
        now = _Answering(leg, path, user, self._worker.fault_of(user), bool(STREAM.search(body)))
        self._now = now
        if now.fault is Fault.LATE:
            now.timer = self._loop.call_later(self._worker.behaviour.late_s, self._take_up, now)
        elif now.fault is Fault.DROPS:
            self._over()
            self._transport.abort()
        elif now.fault is not Fault.HANGS:
            self._take_up(now)

    def _take_up(self, now: _Answering) -> None:
        self._worker.when_ready(now.fault, now.leg.body, lambda: self._answer(now))

    def _answer(self, now: _Answering) -> None:
        if self._now is not now:
            return  # given up meanwhile
        counts = self._worker.counts(now.user, now.path, now.leg.body)
        match now.fault:
            case Fault.FAILS:
                self._refuse(now, "out of memory, by request", 500)
            case Fault.REJECTS:
                self._refuse(now, "no such thing, by request", 400)
            case _ if isinstance(counts, str):
                self._refuse(now, counts, 400)
            case Fault.HOLDS if not now.stream:
                pass
            case _ if now.stream:
                self._stream(now, counts)
            case Fault.RESETS:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                self._loop.call_soon(self.reset)
            case Fault.ENDS_EARLY:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                self._over()
                self._transport.close()
            case Fault.ERROR_FIRST | Fault.ERROR_LATER | Fault.ERROR_ENDS:
                self._refuse(now, "error, by request", 500)
            case _:
                body = whole_answer(now.path, _number(now.user), counts, self._worker.port)
                self._whole(200, orjson.dumps(body))

    def _refuse(self, now: _Answering, message: str, status: int) -> None:
        """As SGLang does: an error of a stream has status 200."""
        if now.stream and now.fault not in (Fault.FAILS, Fault.REJECTS):
            self._begin(error_event(message, status) + DONE)
            self._end()
        else:
            self._whole(status, orjson.dumps(error_answer(message, status)))

    def _whole(self, status: int, body: bytes) -> None:
        self._over()
        self._transport.write(json_answer(body, status))

    def _stream(self, now: _Answering, counts: Counts) -> None:
        number = _number(now.user)
        start = now.leg.body.count(b" %d." % number)  # where another worker has broken off
        events = stream_events(now.path, number, counts, self._worker.port, start)
        now.events.extend(events)
        if now.fault is Fault.ERROR_FIRST:
            self._refuse(now, "error, by request", 500)
            return
        self._begin(now.events.popleft())
        if now.fault is not Fault.HOLDS:
            self._go_on(now)

    def _go_on(self, now: _Answering) -> None:
        """One more event, and a timer for the next; or all of them."""
        if self._now is not now:
            return
        last = 1 if now.fault not in (Fault.NONE, Fault.LATE) else 0
        pace_s = self._worker.behaviour.pace_s
        block = b""
        while len(now.events) > last:
            block += chunked(now.events.popleft())
            if pace_s:
                break
        if block:
            self._transport.write(block)
        if len(now.events) > last:
            now.timer = self._loop.call_later(pace_s, self._go_on, now)
        else:
            self._finish(now)

    def _finish(self, now: _Answering) -> None:
        match now.fault:
            case Fault.RESETS:
                self._loop.call_soon(self.reset)
            case Fault.ERROR_LATER:
                self._transport.write(chunked(error_event("error, by request", 500) + DONE))
                self._end()
            case Fault.ERROR_ENDS:
                self._transport.write(chunked(error_event("error, by request", 500)))
                self._end()
            case _:
                self._end()

    def _begin(self, events: bytes) -> None:
        self._transport.write(STREAM_HEAD + chunked(events))

    def _end(self) -> None:
        self._over()
        self._transport.write(b"0\r\n\r\n")

    def _over(self) -> None:
        now, self._now = self._now, None
        if now is not None and now.timer is not None:
            now.timer.cancel()


def words_of(body: bytes) -> int:
    """Return how many words the answer to a request has."""
    tokens = MAX_TOKENS.search(body)
    return int(tokens[1]) if tokens else 4


def _number(user: str) -> int:
    """Of the request: the digits that its ``user`` begins with."""
    digits = user.partition(" ")[0]
    return int(digits) if digits.isdigit() else 0
