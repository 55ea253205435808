"""The processor time that a thread spends in compiled searches, in the order, and in all else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ppd.ann.lanes import Advanced, CoreLaneSet, Whole
from ppd.ann.space import Rows


class Stopwatch:
    """Counts the processor time of the thread that makes it, compiled code apart.

    Args:
        clock: seconds of processor time of the calling thread. So neither sleep counts, nor a wait
            for a lock, nor what other processes take.

    Attributes:
        choosing_s: seconds in which the order was kept; a part of those outside compiled code.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._began_s = self._ended_s = clock()
        self._compiled_s = 0.0
        self.choosing_s = 0.0

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Count the time within as that of keeping the order."""
        began_s = self._clock()
        yield
        self.choosing_s += self._clock() - began_s

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Count the time within as that of compiled code."""
        began_s = self._clock()
        yield
        self._compiled_s += self._clock() - began_s

    def stop(self) -> None:
        """Stop; called by the thread that made it."""
        self._ended_s = self._clock()

    def other_s(self) -> float:
        """Return the seconds outside compiled code, until the stop."""
        return self._ended_s - self._began_s - self._compiled_s


class TimedLanes:
    """Lanes whose calls a stopwatch counts.

    Args:
        lanes: the lanes.
        watch: that of the thread that searches.
    """

    def __init__(self, lanes: CoreLaneSet, watch: Stopwatch) -> None:
        self._lanes = lanes
        self._watch = watch

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """See ``LaneSet``; it runs no compiled code."""
        return self._lanes.admit(queries, widths)

    def advance(
        self,
        places: Sequence[int],
        steps: int,
        limits: Sequence[int],
        hidden: Sequence[NDArray[np.uint8]],
    ) -> Advanced:
        """See ``LaneSet``."""
        with self._watch.compiled():
            return self._lanes.advance(places, steps, limits, hidden)

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See ``LaneSet``."""
        with self._watch.compiled():
            return self._lanes.release(places, limits, hidden)

    def whole(self, query: Rows, width: int, limit: int, hidden: NDArray[np.uint8]) -> Whole:
        """See ``CoreLaneSet``."""
        with self._watch.compiled():
            return self._lanes.whole(query, width, limit, hidden)
