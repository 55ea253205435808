"""The use of the KV links: what they carry, of what they can carry."""

from __future__ import annotations

_HALF_LIFE_S = 3600.0  # of the highest rate: links and workers change


class LinkUse:
    """Measures the use of the KV links from the bytes that they carried.

    Args:
        bytes_per_s: capacity of all links together; None: the highest rate that they have had.
            Until they were full once, that is too low, and the use too high.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._highest = 0.0

    def observe(self, carried_bytes: float, seconds: float) -> float:
        """Return the use in an interval, 0 to 1."""
        if seconds <= 0 or carried_bytes <= 0:
            return 0.0
        rate = carried_bytes / seconds
        if self._bytes_per_s is not None:
            return min(1.0, rate / self._bytes_per_s)
        self._highest = max(rate, self._highest * 0.5 ** (seconds / _HALF_LIFE_S))
        return rate / self._highest
