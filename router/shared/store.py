"""The commands that the router sends to the shared Valkey or Redis server.

Finished turns and operations are entries of one stream, which every router reads from where it
stopped. The last operation on each worker is also a field of a hash, for routers that start later.
This module holds no state of the router; each failure is a ``StoreError``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.shared_load import entry_id

from ..config.shared import SharedConfig
from .connection import StoreConnection

_ORIGIN, _BATCH = b"o", b"b"  # fields of an entry
_READ_ENTRIES = 64  # at most, in one answer
_BLOCK_S = 1.0  # a read waits for so long for a new entry
_MIN_KEY_MS = 3_600_000
_TRIMMED = 0.9  # of the allowed size: what is left when the stream was too large


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream.

    Attributes:
        id: of the entry; the store orders entries by it.
        origin: the router that wrote it.
        batch: encoded records.
    """

    id: str
    origin: bytes
    batch: bytes

    @property
    def at_ms(self) -> int:
        """The store's time when it was written, in milliseconds."""
        return entry_id(self.id)[0]


class Store:
    """The connections of one router process to the shared store.

    Args:
        config: the options.
        ttl_s: lifetime of an entry.
    """

    def __init__(self, config: SharedConfig, ttl_s: float) -> None:
        self._max_bytes = config.max_bytes
        self._ttl_ms = round(1e3 * ttl_s)
        self._stream = f"{config.prefix}:turns"
        self._drains = f"{config.prefix}:drains"
        self._epoch = f"{config.prefix}:epoch"
        self._commands = StoreConnection(config)
        self._reads = StoreConnection(config)

    async def append(self, origin: bytes, batch: bytes, now_ms: int) -> str:
        """Add an entry, remove those whose lifetime has passed, and return the entry's id.

        Args:
            origin: this router.
            batch: encoded records.
            now_ms: the store's time.
        """
        oldest = f"{max(0, now_ms - self._ttl_ms)}-0"
        name: bytes = await self._commands.run(
            *("XADD", self._stream, "MINID", "~", oldest, "*", _ORIGIN, origin, _BATCH, batch)
        )
        return name.decode()

    async def read(self, after: str, *, wait: bool) -> list[Entry]:
        """Return some entries after one, the oldest first.

        Args:
            after: id of the last entry that was read.
            wait: whether to wait a while if there are none.
        """
        wait_s = _BLOCK_S if wait else 0.0
        block = ("BLOCK", round(1e3 * wait_s)) if wait else ()
        answer = await self._reads.run(
            *("XREAD", "COUNT", _READ_ENTRIES, *block, "STREAMS", self._stream, after),
            wait_s=wait_s,
        )
        return [_entry(name, fields) for _, found in answer or () for name, fields in found]

    async def time_s(self) -> float:
        """Return the store's time, in seconds since 1970."""
        seconds, microseconds = await self._commands.run("TIME")
        return float(seconds) + float(microseconds) / 1e6

    async def epoch(self) -> bytes:
        """Return the random name of the store's content; it changes when the content is lost.

        It is written only if there is none: a store that is full or takes no writes can be read.
        """
        found: bytes | None = await self._commands.run("GET", self._epoch)
        if found is None:
            await self._commands.run("SET", self._epoch, secrets.token_hex(16), "NX")
            found = await self._commands.run("GET", self._epoch)
        return found or b""

    async def keep(self) -> None:
        """Renew the lifetime of all keys: what no router uses any longer is removed."""
        lifetime_ms = max(self._ttl_ms, _MIN_KEY_MS)
        for key in (self._stream, self._drains, self._epoch):
            await self._commands.run("PEXPIRE", key, lifetime_ms)

    async def size_bytes(self) -> int:
        """Return the memory that the entries take."""
        return int(await self._commands.run("MEMORY", "USAGE", self._stream) or 0)

    async def shrink(self, size_bytes: int) -> None:
        """Remove the oldest entries if all of them take more than ``max_bytes``.

        Args:
            size_bytes: the memory that they take.
        """
        if size_bytes <= self._max_bytes:
            return
        entries = int(await self._commands.run("XLEN", self._stream))
        kept = int(entries * _TRIMMED * self._max_bytes / size_bytes)
        await self._commands.run("XTRIM", self._stream, "MAXLEN", kept)

    async def drains(self) -> list[bytes]:
        """Return the encoded operations on workers."""
        found: list[bytes] = await self._commands.run("HVALS", self._drains)
        return found

    async def put_drain(self, url: str, drain: bytes) -> None:
        """Store the encoded operation on a worker."""
        await self._commands.run("HSET", self._drains, url, drain)

    async def close(self) -> None:
        """Close the connections."""
        await self._commands.close()
        await self._reads.close()


class ResponseRecords:
    """The stored responses in the shared store, on a connection of their own.

    Args:
        config: the options.
        ttl_s: lifetime of a response.
    """

    def __init__(self, config: SharedConfig, ttl_s: float) -> None:
        self._prefix = f"{config.prefix}:response"
        self._ttl_ms = round(1e3 * ttl_s)
        self._writes = StoreConnection(config)
        self._reads = StoreConnection(config)

    async def put(self, place: str, sealed: bytes) -> None:
        """Store an encrypted response."""
        await self._writes.run("SET", f"{self._prefix}:{place}", sealed, "PX", self._ttl_ms)

    async def get(self, place: str) -> bytes | None:
        """Return an encrypted response; None if there is none."""
        found: bytes | None = await self._reads.run("GET", f"{self._prefix}:{place}")
        return found

    async def delete(self, place: str) -> None:
        """Delete a response, if it is there."""
        await self._writes.run("DEL", f"{self._prefix}:{place}")

    async def close(self) -> None:
        """Close the connections."""
        await self._writes.close()
        await self._reads.close()


def _entry(name: bytes, fields: Sequence[bytes]) -> Entry:
    """Return an entry; one that no router has written has an empty batch, which is malformed."""
    match fields:
        case [b"o", origin, b"b", batch]:
            return Entry(name.decode(), origin, batch)
    return Entry(name.decode(), b"", b"")
