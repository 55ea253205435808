"""Simulated time: events, run in the order of their times."""

from __future__ import annotations

import heapq

from .lockstep import Then


class Clock:
    """A clock of simulated time, with the events that are due."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._number = 0

    def at(self, at_ms: float, then: Then) -> None:
        """Call ``then`` at a time."""
        self._number += 1
        heapq.heappush(self._events, (max(at_ms, self.now_ms), self._number, then))

    def run(self) -> None:
        """Run all events in order of time."""
        events = self._events
        while events:
            self.now_ms, _, then = heapq.heappop(events)
            then(self.now_ms)
