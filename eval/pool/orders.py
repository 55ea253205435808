"""The ways to serve a burst: ours, and simpler orders of whole searches that a pool could have.

A whole search is not preempted. The simulated and the measured bursts use the same queues. There
are no searches here: items are opaque, and time is passed in.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import count
from typing import Any, Generic, Protocol, TypeVar, assert_never

from ppd.ann.schedule import Stage

from .arrivals import BUDGET_S

BATCH = 16
BATCH_WAIT_S = 0.002
T = TypeVar("T")


class Way(StrEnum):
    """A way to serve bursts of searches."""

    OURS = "ours"  # continuous batching, with the scheduler
    PREFILL_FIRST = "prefill_first"  # one search at a time; decode only while no prefill waits
    EDF = "edf"  # one search at a time, that of the earliest deadline
    FIFO = "fifo"  # one search at a time, the oldest
    TWO_BATCHERS = "two_batchers"  # batches of one stage, without delay; prefill's first
    FIXED = "fixed"  # batches of both stages


class Queue(Protocol[T]):
    """Searches that wait, and the rule that chooses those to serve next."""

    def offer(self, stage: Stage, at_s: float, item: T) -> None:
        """Queue a search that arrived at ``at_s``; a stage's searches come in this order."""

    def take(self, now_s: float) -> list[T]:
        """Dequeue the searches that a free core serves now, in one batch; none: nothing is due."""

    def due_s(self) -> float | None:
        """The time from which ``take`` returns some, without arrivals; None: nothing waits."""


class Ordered(Generic[T]):
    """Searches in the order of a key, taken one at a time.

    Args:
        key: of a search, by its stage and its arrival; of equal keys, the first offered goes first.
    """

    def __init__(self, key: Callable[[Stage, float], tuple[float, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, float, T]] = []
        self._orders = count()

    def offer(self, stage: Stage, at_s: float, item: T) -> None:
        """See ``Queue``."""
        heapq.heappush(self._heap, (self._key(stage, at_s), next(self._orders), at_s, item))

    def take(self, now_s: float) -> list[T]:
        """See ``Queue``."""
        return [heapq.heappop(self._heap)[-1]] if self._heap else []

    def due_s(self) -> float | None:
        """See ``Queue``."""
        return self._heap[0][2] if self._heap else None


class Batcher(Generic[T]):
    """Searches in the order of arrival, taken in batches.

    Args:
        size: searches of a full batch.
        wait_s: age of the oldest search from which a batch need not be full.
    """

    def __init__(self, size: int, wait_s: float) -> None:
        self._size = size
        self._wait_s = wait_s
        self._waiting: deque[tuple[float, T]] = deque()

    def offer(self, stage: Stage, at_s: float, item: T) -> None:
        """See ``Queue``."""
        self._waiting.append((at_s, item))

    def take(self, now_s: float) -> list[T]:
        """See ``Queue``."""
        due_s = self.due_s()
        if due_s is None or now_s < due_s:
            return []
        return [self._waiting.popleft()[1] for _ in range(min(self._size, len(self._waiting)))]

    def due_s(self) -> float | None:
        """See ``Queue``."""
        if not self._waiting:
            return None
        oldest_s = self._waiting[0][0] + self._wait_s
        if len(self._waiting) < self._size:
            return oldest_s
        return min(oldest_s, self._waiting[self._size - 1][0])


class Batchers(Generic[T]):
    """A batcher for each stage. If the batches of both are due, the first stage's goes first."""

    def __init__(self, batchers: Mapping[Stage, Batcher[T]]) -> None:
        self._batchers = batchers

    def offer(self, stage: Stage, at_s: float, item: T) -> None:
        """See ``Queue``."""
        self._batchers[stage].offer(stage, at_s, item)

    def take(self, now_s: float) -> list[T]:
        """See ``Queue``."""
        for batcher in self._batchers.values():
            if batch := batcher.take(now_s):
                return batch
        return []

    def due_s(self) -> float | None:
        """See ``Queue``."""
        dues_s = (batcher.due_s() for batcher in self._batchers.values())
        return min((due_s for due_s in dues_s if due_s is not None), default=None)


def queue_of(way: Way) -> Queue[Any]:
    """Return the empty queue of a way of whole searches; ours has none, it has the scheduler."""
    match way:
        case Way.PREFILL_FIRST:
            return Ordered(lambda stage, at_s: (float(stage is Stage.DECODE), at_s))
        case Way.EDF:
            return Ordered(lambda stage, at_s: (at_s + BUDGET_S[stage],))
        case Way.FIFO:
            return Ordered(lambda stage, at_s: (at_s,))
        case Way.TWO_BATCHERS:
            return Batchers({stage: Batcher(BATCH, 0.0) for stage in Stage})  # prefill is the first
        case Way.FIXED:
            return Batcher(BATCH, BATCH_WAIT_S)
        case Way.OURS:
            raise AssertionError("ours has no queue of whole searches")
        case _:
            assert_never(way)
