"""The arrival rate of turns: the one definition for sweeps, tables and the router.

The rate counts requests of any turn in a sliding window. Where a table is read or built, that of
the whole cluster is divided by the number of decode workers. Time is passed in.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
_SLOTS = 60


class ArrivalRate:
    """Counts arrivals in slots of a sliding window, so memory does not grow with the rate.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        assert window_s > 0
        self._window_s = window_s
        self._slot_s = window_s / _SLOTS
        self._slots: deque[list[float]] = deque()  # [start_s, arrivals], the oldest first
        self._total = 0
        self._first_s: float | None = None

    def note(self, now_s: float) -> None:
        """Record one arrival; ``now_s`` must not decrease from call to call."""
        if self._first_s is None:
            self._first_s = now_s
        self._drop_before(now_s - self._window_s)
        if not self._slots or now_s - self._slots[-1][0] >= self._slot_s:
            self._slots.append([now_s, 0])
        self._slots[-1][1] += 1
        self._total += 1

    def per_second(self, now_s: float) -> float:
        """The arrivals per second within the window; 0 before the first.

        While the first window is not over, the divisor is the time that has passed, and at least
        a second: two requests at once are no high rate.
        """
        self._drop_before(now_s - self._window_s)
        if self._first_s is None:
            return 0.0
        return self._total / min(self._window_s, max(1.0, now_s - self._first_s))

    def _drop_before(self, start_s: float) -> None:
        while self._slots and self._slots[0][0] <= start_s:
            self._total -= int(self._slots.popleft()[1])
