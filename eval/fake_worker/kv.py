"""The KV that a fake worker holds, and its transfers.

After a restart a worker holds nothing, so it refuses local turns. A decode worker answers only
when its prefill worker has the request, too.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import OrderedDict
from typing import Any, cast

from ppd.contract import LOCAL_MARKER, MIN_CACHED_TOKENS, Refusal, RefusalReason

from ..dialects import Counts

_MAX_HELD = 5000  # conversations
_MAX_ROOMS = 20_000
_ROOM = re.compile(rb'"bootstrap_port":(\d+),"bootstrap_room":(\d+)')
_MIN_CACHED = re.compile(rb'"%b":(\d+)' % MIN_CACHED_TOKENS.encode())


class KvState:
    """The conversations whose KV a worker holds, and the transfers under way.

    Attributes:
        transfers: receives the datagrams of other workers.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, int] = OrderedDict()
        self.transfers = Transfers()

    def counts(self, conversation: str, body: bytes, words: int) -> Counts | str:
        """Return the token counts of an answer, or the message of a refused local turn."""
        prompt = len(body) // 4
        held = self._held.get(conversation, 0)
        cached = 0
        if LOCAL_MARKER.encode() in body:
            required = _MIN_CACHED.search(body)
            if required is not None and held < int(required[1]):
                reason = RefusalReason.TOO_FEW_CACHED_TOKENS
                return Refusal(reason, held, int(required[1])).to_message()
            cached = min(held, prompt - 1)
        self._held[conversation] = prompt + words
        self._held.move_to_end(conversation)
        if len(self._held) > _MAX_HELD:
            self._held.popitem(last=False)
        return Counts(prompt, words, cached)

    async def wait_for_transfer(self, role: str, transfers: bool, body: bytes) -> None:
        """Wait until the KV of a request is there; a prefill worker announces it instead.

        Args:
            transfers: whether a prefill worker transfers the KV of this request.
        """
        room = _ROOM.search(body)
        if room is None:
            return
        if role == "decode":
            await self.transfers.ask(int(room[1]), room[2])
        elif transfers:
            self.transfers.give(room[2])


class Transfers(asyncio.DatagramProtocol):
    """KV transfers by bootstrap room, as datagrams between workers.

    A decode worker asks for a room; its prefill worker answers when the KV is there. As with
    Mooncake, a transfer waits for ever if one of the two has died.
    """

    def __init__(self) -> None:
        self._transport: asyncio.DatagramTransport
        self._given: OrderedDict[bytes, None] = OrderedDict()
        self._wanted: OrderedDict[bytes, Any] = OrderedDict()  # by address
        self._waits: OrderedDict[bytes, asyncio.Future[None]] = OrderedDict()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, with room for many datagrams."""
        self._transport = cast(asyncio.DatagramTransport, transport)
        link: socket.socket = transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 2**20)

    async def ask(self, port: int, room: bytes) -> None:
        """Ask the prefill worker on ``port`` for a room, and wait until it is there."""
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _keep(self._waits, room, arrival)
        self._transport.sendto(b"?" + room, ("127.0.0.1", port))
        await arrival

    def give(self, room: bytes) -> None:
        """Announce that the KV of a room is there."""
        if (address := self._wanted.pop(room, None)) is not None:
            self._transport.sendto(b"!" + room, address)
        else:
            _keep(self._given, room, None)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Take a question or an announcement of another worker."""
        room = data[1:]
        if data.startswith(b"!"):
            arrival = self._waits.pop(room, None)
            if arrival is not None and not arrival.done():
                arrival.set_result(None)
        elif room in self._given:
            del self._given[room]
            self._transport.sendto(b"!" + room, addr)
        else:
            _keep(self._wanted, room, addr)


def _keep(rooms: OrderedDict[bytes, Any], room: bytes, value: Any) -> None:
    rooms[room] = value
    if len(rooms) > _MAX_ROOMS:
        rooms.popitem(last=False)
