"""Stored responses of the Responses API that every router can continue.

A response is written in the background, encrypted, and read when a client names one that this
router does not have.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from .metrics import SharedMetrics
from .problems import Side, StoreError, StoreProblem, StoreStatus

if TYPE_CHECKING:  # they need more packages
    from .sealing import Sealing
    from .store import ResponseRecords

_MAX_BYTES = 4 * 1024 * 1024  # of one response; a larger one stays where it is
_MAX_QUEUED_BYTES = 64 * 1024 * 1024
_THREAD_BYTES = 64 * 1024  # more is encrypted in a thread
_VISIBLE_S = 0.1  # a response is looked for so long: it may have ended just now
_PAUSE_S = 0.02
_RETRY_S = 1.0

Parts = tuple[bytes, bytes]  # a response and the conversation that ends with it, as JSON


class SharedResponses:
    """The responses of all routers.

    Args:
        records: of the store.
        sealing: encrypts them.
        status: of the store.
        metrics: of the store.
        deleted: called with the name of a response that a client has deleted.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        records: ResponseRecords,
        sealing: Sealing,
        status: StoreStatus,
        metrics: SharedMetrics,
        deleted: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._sealing = sealing
        self._status = status
        self._metrics = metrics
        self._deleted = deleted
        self._clock = clock
        # By tenant and name; None: to be deleted.
        self._queue: OrderedDict[tuple[str, str], Parts | None] = OrderedDict()
        self._queued_bytes = 0
        self._wake = asyncio.Event()

    def put(self, tenant: str, name: str, parts: Parts) -> None:
        """Queue a response; beyond the bound the oldest are dropped, but no deletion is."""
        size = _size(parts)
        if size > _MAX_BYTES:
            self._metrics.responses.add("too_large")
            return
        self._enqueue(tenant, name, parts)
        while self._queued_bytes > _MAX_QUEUED_BYTES:
            oldest = next(place for place, queued in self._queue.items() if queued is not None)
            self._queued_bytes -= _size(self._queue.pop(oldest))
            self._metrics.responses.add("dropped")

    async def get(self, tenant: str, name: str) -> Parts | None:
        """Return a tenant's response; None if there is none, or the store fails."""
        if (tenant, name) in self._queue:
            return self._queue[tenant, name]
        ends_s = self._clock() + _VISIBLE_S
        try:
            while True:
                sealed = await self._records.get(self._sealing.place(tenant, name))
                self._status.worked(Side.RESPONSES)
                if sealed is not None:
                    return self._opened(tenant, name, sealed)
                if self._clock() >= ends_s:
                    return None
                await asyncio.sleep(_PAUSE_S)
        except StoreError as error:
            self._status.failed(Side.RESPONSES, error)
            return None

    async def check(self) -> None:
        """Read from the store, so that the end of a failure is found without a client's request."""
        try:
            await self._records.get("none")
        except StoreError as error:
            self._status.failed(Side.RESPONSES, error)
        else:
            if not self._queue:  # a write may fail where a read does not
                self._status.worked(Side.RESPONSES)

    def delete(self, tenant: str, name: str) -> None:
        """Delete a response here, in the store, and at the other routers."""
        self._enqueue(tenant, name, None)
        self._deleted(name)

    async def run_forever(self) -> None:
        """Write and delete what is queued, again and again."""
        while True:
            await self._wake.wait()
            try:
                await self._write()
            except StoreError as error:
                self._status.failed(Side.RESPONSES, error)
                await asyncio.sleep(_RETRY_S)

    async def flush(self, limit_s: float) -> None:
        """Write all that is queued, as long as the store takes it in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._write()
        except TimeoutError:
            pass  # the rest is lost with this process
        except StoreError as error:
            self._status.failed(Side.RESPONSES, error)

    async def _write(self) -> None:
        while self._queue:
            (tenant, name), parts = next(iter(self._queue.items()))
            place = self._sealing.place(tenant, name)
            if parts is None:
                await self._records.delete(place)
            else:
                if _size(parts) > _THREAD_BYTES:
                    sealed = await asyncio.to_thread(self._sealing.seal, tenant, name, parts)
                else:
                    sealed = self._sealing.seal(tenant, name, parts)
                await self._records.put(place, sealed)
                self._metrics.responses.add("written")
            if self._queue.get((tenant, name)) is parts:  # it was not deleted in the meantime
                del self._queue[tenant, name]
                self._queued_bytes -= _size(parts)
        self._wake.clear()
        self._status.worked(Side.RESPONSES)

    def _enqueue(self, tenant: str, name: str, parts: Parts | None) -> None:
        replaced = self._queue.pop((tenant, name), None)
        self._queued_bytes += _size(parts) - _size(replaced)
        self._queue[tenant, name] = parts
        self._wake.set()

    def _opened(self, tenant: str, name: str, sealed: bytes) -> Parts | None:
        from .sealing import UnsealedError

        try:
            return self._sealing.open(tenant, name, sealed)
        except UnsealedError as error:
            self._status.noticed(StoreProblem.SEALED, str(error))
            return None


def _size(parts: Parts | None) -> int:
    return 0 if parts is None else len(parts[0]) + len(parts[1])
