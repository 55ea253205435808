"""How many turns arrive a second: the one definition for sweeps, tables and the router.

A rate over a sliding window, of requests of any turn, for the whole cluster; divided by its
decode workers where a table is read or made. Knows no clock.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
_SLOTS = 60


class ArrivalRate:
    """Arrivals in slots of half a second, so that memory does not grow with the rate."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        assert window_s > 0
        self._window_s = window_s
        self._slot_s = window_s / _SLOTS
        self._slots: deque[list[float]] = deque()  # [start_s, arrivals], the oldest first
        self._total = 0
        self._first_s: float | None = None

    def note(self, now_s: float) -> None:
        """One arrival. ``now_s`` never goes back."""
        if self._first_s is None:
            self._first_s = now_s
        if not self._slots or now_s - self._slots[-1][0] >= self._slot_s:
            self._slots.append([now_s, 0])
        self._slots[-1][1] += 1
        self._total += 1

    def per_second(self, now_s: float) -> float:
        """Arrivals a second within the window; 0 before the first.

        A window that has only begun is divided by what has passed of it, but by no less than
        a second: two requests at once are no high rate.
        """
        while self._slots and self._slots[0][0] <= now_s - self._window_s:
            self._total -= int(self._slots.popleft()[1])
        if self._first_s is None:
            return 0.0
        return self._total / min(self._window_s, max(1.0, now_s - self._first_s))
