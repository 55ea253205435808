"""The store's time, which orders the records of all routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs redis
    from .store import Store


class StoreClock:
    """The store's time, computed from this process's clock.

    The error is at most the time that the request for the store's time took.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead_s: float | None = None  # of the clock

    async def read(self, store: Store) -> None:
        """Read the store's time.

        Raises:
            StoreError: the store does not answer.
        """
        store_s = await store.time_s()
        self._ahead_s = store_s - self._clock()

    async def now_ms(self, store: Store) -> int:
        """Return the store's time in milliseconds; it is read if it is not known.

        Raises:
            StoreError: the store does not answer.
        """
        if self._ahead_s is None:
            await self.read(store)
        return round(1e3 * self._now_s())

    def local_s(self, at_ms: int) -> float:
        """Return a time of the store by this process's clock; never later than now."""
        now_s = self._clock()
        if self._ahead_s is None:
            return now_s
        return min(now_s, at_ms / 1e3 - self._ahead_s)

    def _now_s(self) -> float:
        assert self._ahead_s is not None, "the store's time has been read"
        return self._clock() + self._ahead_s
