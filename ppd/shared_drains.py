"""The drains of workers that routers agree on.

Of two operations on a worker the later one is in force. The rule is a maximum, so routers that
have the same records have the same state, in whatever order the records arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppd.shared_records import DrainRecord

_MAX_WORKERS = 4096


def later(one: DrainRecord, other: DrainRecord) -> DrainRecord:
    """Return the operation that is in force; the tie of two clocks is decided by the values."""
    return max(one, other, key=_order)


def _order(record: DrainRecord) -> tuple[int, str, bool, str]:
    return record.at_ms, record.origin, record.draining, record.boot_id or ""


class SharedDrains:
    """The last operation on each worker.

    Args:
        max_workers: workers to keep; beyond them the operations that are oldest are dropped.
    """

    def __init__(self, max_workers: int = _MAX_WORKERS) -> None:
        self._max_workers = max_workers
        self._by_url: dict[str, DrainRecord] = {}

    @property
    def records(self) -> Iterable[DrainRecord]:
        """The operations in force, one for each worker."""
        return self._by_url.values()

    def of(self, url: str) -> DrainRecord | None:
        """The operation in force on a worker; None if there was none."""
        return self._by_url.get(url)

    def merge(self, record: DrainRecord) -> bool:
        """Take an operation, and return whether it is now in force and was not before."""
        known = self._by_url.get(record.url)
        if known is not None and later(known, record) == known:
            return False
        self._by_url[record.url] = record
        if len(self._by_url) > self._max_workers:
            oldest = min(self._by_url.values(), key=_order)
            del self._by_url[oldest.url]
            return oldest != record
        return True
