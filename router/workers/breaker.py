"""The circuit breaker of a worker that answers its probes, but fails its requests.

Which worker a failure is held against is decided in ``ppd/attempts.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Opens after ``failures`` in a row; then lets one request through every ``rest_s``, until
    one succeeds.

    Args:
        failures: 0: it never opens.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        failures: int = 5,
        rest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failed = 0
        self._admits_at_s = 0.0
        self.open = False

    @property
    def admits(self) -> bool:
        """Whether a request may be sent."""
        return not self.open or self._clock() >= self._admits_at_s

    def sent(self) -> None:
        """A request goes there: on an open breaker it is a trial, and the next one must wait."""
        if self.open:
            self._admits_at_s = self._clock() + self._rest_s

    def failed(self) -> None:
        self._failed += 1
        self.open = 0 < self._most <= self._failed
        if self.open:
            self._admits_at_s = self._clock() + self._rest_s

    def succeeded(self) -> None:
        self._failed, self.open = 0, False
