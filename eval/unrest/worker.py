"""A worker of ``load-router``: a process that may be killed at any time.

It keeps what an engine keeps: conversations it holds KV of, so that a local turn after a restart
is refused; and transfers, so that a decode worker answers only when its prefill worker has
the request too. Run as ``python -m eval.unrest.worker ROLE PORT MODEL``.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import orjson
import uvloop

from ppd.contract import LOCAL_MARKER, MIN_CACHED_TOKENS, Refusal, RefusalReason

from ..dialects import Counts
from ..faults.workers import Behaviour, Fault, FaultyConnection, FaultyWorker, words_of

FLAP = "/flap"
_PACE_S, _LATE_S = 0.002, 0.05
_HELD = 5000  # conversations
_ROOMS = 20_000
_ROOM = re.compile(rb'"bootstrap_port":(\d+),"bootstrap_room":(\d+)')
_LEAST = re.compile(rb'"%b":(\d+)' % MIN_CACHED_TOKENS.encode())
_GIVES = (Fault.NONE, Fault.LATE)  # a prefill worker's ways in which there is KV


class LoadWorker(FaultyWorker):
    def __init__(self, role: str, model: str) -> None:
        super().__init__(role, model, Behaviour(late_s=_LATE_S, pace_s=_PACE_S))
        self._held: OrderedDict[str, int] = OrderedDict()
        self.transfers = Transfers()

    async def serve(self, port: int) -> None:
        await self.listen(port)
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self.transfers, ("127.0.0.1", port))
        await asyncio.Event().wait()

    def connection(self) -> FaultyConnection:
        return _Connection(self)

    def flap(self, down_s: float) -> None:
        """The network is gone for a while; the process lives on."""
        loop = asyncio.get_running_loop()
        self.vanish()
        loop.call_later(down_s, lambda: loop.create_task(self.listen()))

    def counts(self, user: str, path: str, body: bytes) -> Counts | str:
        conversation = user.split()[1]
        prompt, words = len(body) // 4, words_of(body)
        held = self._held.get(conversation, 0)
        cached = 0
        if LOCAL_MARKER.encode() in body:
            least = _LEAST.search(body)
            if least is not None and held < int(least[1]):
                reason = RefusalReason.TOO_FEW_CACHED_TOKENS
                return Refusal(reason, held, int(least[1])).to_message()
            cached = min(held, prompt - 1)
        self._held[conversation] = prompt + words
        self._held.move_to_end(conversation)
        if len(self._held) > _HELD:
            self._held.popitem(last=False)
        return Counts(prompt, words, cached)

    def when_ready(self, fault: Fault, body: bytes, answer: Callable[[], None]) -> None:
        room = _ROOM.search(body)
        if room is None:
            answer()
        elif self.role == "decode":
            self.transfers.ask(int(room[1]), room[2], answer)
        else:
            if fault in _GIVES:
                self.transfers.give(room[2])
            answer()


class Transfers(asyncio.DatagramProtocol):
    """Rooms, by datagrams: a decode worker asks for one, its prefill worker says when it is there.

    Like Mooncake's, these may wait for ever if one of the two has died.
    """

    def __init__(self) -> None:
        self._transport: asyncio.DatagramTransport
        self._given: OrderedDict[bytes, None] = OrderedDict()
        self._wanted: OrderedDict[bytes, Any] = OrderedDict()  # by whom
        self._waits: OrderedDict[bytes, Callable[[], None]] = OrderedDict()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        link: socket.socket = transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 2**20)

    def ask(self, port: int, room: bytes, answer: Callable[[], None]) -> None:
        _keep(self._waits, room, answer)
        self._transport.sendto(b"?" + room, ("127.0.0.1", port))

    def give(self, room: bytes) -> None:
        if (asker := self._wanted.pop(room, None)) is not None:
            self._transport.sendto(b"!" + room, asker)
        else:
            _keep(self._given, room, None)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        room = data[1:]
        if data.startswith(b"!"):
            if (answer := self._waits.pop(room, None)) is not None:
                answer()
        elif room in self._given:
            del self._given[room]
            self._transport.sendto(b"!" + room, addr)
        else:
            _keep(self._wanted, room, addr)


def _keep(rooms: OrderedDict[bytes, Any], room: bytes, value: Any) -> None:
    rooms[room] = value
    if len(rooms) > _ROOMS:
        rooms.popitem(last=False)


class _Connection(FaultyConnection):
    def control(self, path: str, body: bytes) -> object | None:
        if path != FLAP:
            return super().control(path, body)
        # Not now: this connection, too, is one of those that break.
        loop = asyncio.get_running_loop()
        worker = cast(LoadWorker, self._worker)
        loop.call_later(0.01, worker.flap, orjson.loads(body)["down_s"])
        return {}


if __name__ == "__main__":
    uvloop.run(LoadWorker(sys.argv[1], sys.argv[3]).serve(int(sys.argv[2])))
