"""Reads the records of other routers from the shared store.

The stream is read from the beginning of the records' lifetime at a start, and from the last entry
that was read after a lost connection. So an interruption loses nothing that is still stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ppd.errors import ForeignFormatError, MalformedBatchError
from ppd.shared_load import SharedLoad, entry_id
from ppd.shared_records import Batch, decode

from .clock import StoreClock
from .metrics import SharedMetrics
from .problems import Side, StoreError, StoreProblem, StoreStatus

if TYPE_CHECKING:  # it needs redis
    from .store import Entry, Store

logger = logging.getLogger("ppd.router.shared")

_PAUSE_S = 0.025  # between two reads, so that one reads the batches of all routers
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # pauses after failures in a row


class Subscriber:
    """The task that reads records.

    Args:
        store: that is read.
        origin: names this router; its own records are skipped.
        ttl_s: lifetime of a record.
        store_clock: the store's time.
        status: of the store.
        metrics: of the store.
        load: records which entries have been read.
        apply: called with each batch of another router, and the router's name.
        clock: seconds, monotonic.

    Attributes:
        caught_up: set when all records that were stored at the start have been applied.
    """

    def __init__(
        self,
        store: Store,
        origin: bytes,
        ttl_s: float,
        store_clock: StoreClock,
        status: StoreStatus,
        metrics: SharedMetrics,
        load: SharedLoad,
        apply: Callable[[Batch, bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._origin = origin
        self._ttl_s = ttl_s
        self._store_clock = store_clock
        self._status = status
        self._metrics = metrics
        self._load = load
        self._apply = apply
        self._clock = clock
        self._last: str | None = None  # id of the last entry that was read
        self._epoch: bytes | None = None
        self.caught_up = asyncio.Event()

    async def run_forever(self) -> None:
        """Read the stream, and open another connection after a failure."""
        failures = 0
        while True:
            try:
                await self._begin()
                while True:
                    await self._read_once()
                    failures = 0
                    await asyncio.sleep(_PAUSE_S)
            except StoreError as error:
                self._status.failed(Side.READ, error)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1

    async def check_epoch(self) -> bool:
        """Return whether the store has lost its records since the last check.

        Raises:
            StoreError: the store does not answer.
        """
        epoch, known = await self._store.epoch(), self._epoch
        self._epoch = epoch
        if known is None or epoch == known:
            return False
        self._last = None
        self._status.noticed(
            StoreProblem.EMPTIED, "its records are gone; new ones are written as turns finish"
        )
        return True

    async def _begin(self) -> None:
        """Find the position to read from, and read what is stored."""
        await self._store_clock.read(self._store)
        await self.check_epoch()
        while await self._read_some(wait=False):
            pass
        self._status.worked(Side.READ)
        self.caught_up.set()

    async def _read_once(self) -> None:
        await self._read_some(wait=True)
        self._status.worked(Side.READ)

    async def _read_some(self, *, wait: bool) -> bool:
        """Read and apply some entries, and return whether there were any."""
        if self._last is None:
            now_ms = await self._store_clock.now_ms(self._store)
            self._last = f"{max(0, now_ms - round(1e3 * self._ttl_s))}-0"
        after = self._last
        entries = await self._store.read(after, wait=wait)
        for entry in entries:
            if entry.origin != self._origin:
                self._apply_entry(entry)
                await asyncio.sleep(0)  # requests are served between two batches
        self._load.read_until(entry_id(entries[-1].id) if entries else None, self._clock())
        if entries and self._last is after:  # the store has not been emptied in the meantime
            self._last = entries[-1].id
        return bool(entries)

    def _apply_entry(self, entry: Entry) -> None:
        written_at_s = self._store_clock.local_s(entry.at_ms)
        try:
            batch = decode(entry.batch, written_at_s)
        except ForeignFormatError as error:
            self._metrics.unreadable.add(StoreProblem.FOREIGN_FORMAT)
            self._status.noticed(StoreProblem.FOREIGN_FORMAT, str(error))
        except MalformedBatchError as error:
            self._metrics.unreadable.add(StoreProblem.MALFORMED)
            self._status.noticed(StoreProblem.MALFORMED, str(error))
        else:
            self._apply(batch, entry.origin)
            self._metrics.visible.of().observe(self._clock() - written_at_s)
