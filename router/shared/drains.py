"""Drains of workers that an operator has made at another router."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from ppd.shared_drains import SharedDrains
from ppd.shared_records import DrainRecord

from ..workers.registry import WorkerRegistry
from ..workers.worker import Server

if TYPE_CHECKING:  # it needs redis
    from .store import Store

logger = logging.getLogger("ppd.router.workers")


class DrainSharing:
    """Applies the operations of other routers, and records those of this one.

    Args:
        registry: the workers.
        origin: names this router.
        publish: queues an operation for the other routers.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        origin: str,
        publish: Callable[[DrainRecord], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._origin = origin
        self._publish = publish
        self._wall_clock = wall_clock
        self._drains = SharedDrains()

    def changed(self, server: Server) -> None:
        """Record that an operator has drained or resumed a server here."""
        at_ms = round(1e3 * self._wall_clock())
        if (known := self._drains.of(server.url)) is not None:
            at_ms = max(at_ms, known.at_ms + 1)  # it is later, whatever the clocks show
        boot_id = server.handshake.boot_id
        record = DrainRecord(server.url, boot_id, server.draining, at_ms, self._origin)
        self._drains.merge(record)
        self._publish(record)

    def apply(self, records: Iterable[DrainRecord]) -> None:
        """Apply the operations that are later than those known here."""
        for record in records:
            if self._drains.merge(record):
                self._apply(record)

    def _apply(self, record: DrainRecord) -> None:
        server = self._registry.at(record.url)
        if server is None or server.handshake.boot_id != record.boot_id:
            if record.draining:  # in force when that process joins, or this router sees its restart
                self._registry.drained[record.url] = record.boot_id
            else:
                self._registry.drained.pop(record.url, None)
            return
        if server.draining is record.draining:
            return
        server.draining = record.draining
        logger.info(
            "worker %s: %s %s (at another router)",
            *("draining" if record.draining else "resumed", server.role, server.url),
        )
        self._registry.served_by(server).on_change()

    async def reconcile(self, store: Store) -> None:
        """Apply the stored operations, and store those that are missing there.

        Raises:
            StoreError: the store does not answer.
        """
        stored: dict[str, DrainRecord] = {}
        for data in await store.drains():
            try:
                record = msgspec.json.decode(data, type=DrainRecord)
            except (msgspec.DecodeError, ValueError):
                continue  # another version's; ours replaces it at the next operation
            stored[record.url] = record
        self.apply(stored.values())
        for record in list(self._drains.records):
            if stored.get(record.url) != record:
                await store.put_drain(record.url, msgspec.json.encode(record))
