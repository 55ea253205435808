"""The circuit breaker of one worker.

It opens when requests fail although the worker answers its health checks. ``ppd/attempts.py``
decides which worker a failure counts against.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """A circuit breaker that opens after a number of failures in a row.

    An open breaker is half-open once every ``open_s`` seconds: it admits one trial request. It
    closes when a request succeeds.

    Args:
        failures: failures in a row that open the breaker; 0 if it never opens.
        open_s: seconds between two trial requests.
        clock: seconds, monotonic.

    Attributes:
        open: whether the breaker is open.
    """

    def __init__(
        self,
        failures: int = 5,
        open_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._admits_at_s = 0.0
        self.open = False

    @property
    def admits(self) -> bool:
        """Whether a request may be sent to the worker."""
        return not self.open or self._clock() >= self._admits_at_s

    def sent(self) -> None:
        """Record that a request is sent to the worker; on an open breaker it is the trial."""
        if self.open:
            self._admits_at_s = self._clock() + self._open_s

    def failed(self) -> None:
        """Record that a request failed."""
        self._failures += 1
        self.open = 0 < self._max_failures <= self._failures
        if self.open:
            self._admits_at_s = self._clock() + self._open_s

    def succeeded(self) -> None:
        """Record that a request succeeded; the breaker closes."""
        self._failures, self.open = 0, False
