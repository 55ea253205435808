"""The processor time that a thread spends in compiled searches, and in all else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ppd.ann.lanes import LaneSet
from ppd.ann.space import Rows


class Stopwatch:
    """Counts the processor time of the thread that makes it, compiled code apart.

    Args:
        clock: seconds of processor time of the calling thread. So neither sleep counts, nor a wait
            for a lock, nor what other processes take.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._began_s = clock()
        self._compiled_s = 0.0

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Count the time within as that of compiled code."""
        began_s = self._clock()
        yield
        self._compiled_s += self._clock() - began_s

    def other_s(self) -> float:
        """Return the seconds outside compiled code so far."""
        return self._clock() - self._began_s - self._compiled_s


class TimedLanes:
    """Lanes whose calls a stopwatch counts.

    Args:
        lanes: the lanes.
        watch: that of the thread that searches.
    """

    def __init__(self, lanes: LaneSet, watch: Stopwatch) -> None:
        self._lanes = lanes
        self._watch = watch

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """See ``LaneSet``."""
        with self._watch.compiled():
            return self._lanes.admit(queries, widths)

    def extend(self, places: NDArray[np.int64], steps: int) -> int:
        """See ``LaneSet``."""
        with self._watch.compiled():
            return self._lanes.extend(places, steps)

    def finished(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``LaneSet``."""
        return self._lanes.finished(places)

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See ``LaneSet``."""
        with self._watch.compiled():
            return self._lanes.release(places, limits, hidden)
