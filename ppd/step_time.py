"""The time of a decode step now, from the TPOT of recent turns.

A cell's TPOT was measured with the batch of its own rate. All requests of a batch share its steps,
whatever their cells, so a turn that joins a batch gets the batch's TPOT.
"""

from __future__ import annotations

from ppd.observed import BOUND

_TURNS = 50.0  # that the means reach back


class StepTime:
    """Means over recent turns of all decode workers."""

    def __init__(self) -> None:
        self._means: tuple[float, float] | None = None  # of TPOT, and of the batch

    def note(self, running: int, tpot_ms: float, expected_ms: float, usually: float) -> None:
        """Record a served turn.

        Args:
            running: requests that decoded on its worker when it was decided.
            tpot_ms: that it had. A reply of few tokens may have stalled, so this is bounded.
            expected_ms: TPOT of its cell, from which the means begin.
            usually: requests that decoded when that was measured.
        """
        mean_ms, mean_batch = self._means or (expected_ms, usually + 1.0)
        tpot_ms = max(mean_ms / BOUND, min(mean_ms * BOUND, tpot_ms))
        self._means = (
            mean_ms + (tpot_ms - mean_ms) / _TURNS,
            mean_batch + (running + 1.0 - mean_batch) / _TURNS,
        )

    def of(self, running: int, expected_ms: float, min_ms: float) -> float:
        """Return a step's time in ms for a turn that joins a batch: linear in its size.

        Args:
            running: requests that decode on the worker.
            expected_ms: TPOT of the turn's cell; it counts as long as no turn was served.
            min_ms: no step is shorter.
        """
        if self._means is None:
            return expected_ms
        mean_ms, mean_batch = self._means
        share = (running + 1.0) / mean_batch
        return min_ms + share * max(0.0, mean_ms - min_ms)

    def reset(self) -> None:
        """Discard the means."""
        self._means = None
