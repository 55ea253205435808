"""What workers were sent to prefill and have not answered yet: tokens, and the time they take.

They are reservations: a turn's tokens are added in the step in which it is decided, so that turns
decided at once see each other and cannot stampede to one worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """What a prefill worker does for a turn; 0 where no table gives its times."""

    compute_ms: float = 0.0
    transfer_ms: float = 0.0


NO_WORK = Work()


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A turn in a worker's queue."""

    worker: str
    tokens: int
    work: Work


@dataclass(slots=True)
class _Queue:
    """A worker's queue: it computes one prompt after the other, and sends their KV likewise.

    Attributes:
        computed_s: when all will be computed.
        sent_s: when all KV will be sent.
    """

    turns: dict[Queued, None] = field(default_factory=dict)  # in the order in which they came
    tokens: int = 0
    computed_s: float = 0.0
    sent_s: float = 0.0

    def add(self, turn: Queued, now_s: float) -> None:
        self.turns[turn] = None
        self.tokens += turn.tokens
        self.computed_s = max(self.computed_s, now_s) + turn.work.compute_ms / 1e3
        self.sent_s = max(self.sent_s, self.computed_s) + turn.work.transfer_ms / 1e3

    def remove(self, turn: Queued, now_s: float) -> None:
        """Remove a turn. The answer of the first one shows when the next one was begun."""
        was_first = next(iter(self.turns)) is turn
        del self.turns[turn]
        self.tokens -= turn.tokens
        computed_s = now_s + sum(one.work.compute_ms for one in self.turns) / 1e3
        if was_first:
            self.computed_s = max(self.computed_s, computed_s - turn.work.transfer_ms / 1e3)
        self.computed_s = min(self.computed_s, computed_s)
        transfer_s = sum(one.work.transfer_ms for one in self.turns) / 1e3
        self.sent_s = min(self.sent_s, max(self.computed_s, now_s) + transfer_s)


class Backlog:
    """The prefill queues of all workers, by identity.

    Args:
        clock: seconds, monotonic.

    Attributes:
        on_change: called after each change; None: nothing is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] | None = None
        self._clock = clock
        self._queues: dict[str, _Queue] = {}

    def all(self) -> dict[str, int]:
        """Return the tokens of all workers that have any."""
        return {worker: queue.tokens for worker, queue in self._queues.items() if queue.tokens}

    def of(self, worker: str) -> int:
        """Tokens in a worker's queue."""
        queue = self._queues.get(worker)
        return 0 if queue is None else queue.tokens

    def wait_ms(self, worker: str, compute_ms: float) -> float:
        """Return how long a further turn waits, for the worker or then for its link.

        Args:
            worker: that prefills it.
            compute_ms: what it takes for that.
        """
        if (queue := self._queues.get(worker)) is None:
            return 0.0
        now_s = self._clock()
        computed_ms, sent_ms = 1e3 * (queue.computed_s - now_s), 1e3 * (queue.sent_s - now_s)
        return max(0.0, computed_ms, sent_ms - compute_ms)

    def add(self, worker: str, tokens: int, work: Work = NO_WORK) -> Queued:
        """Reserve a turn's tokens, and return what gives them back."""
        assert tokens >= 0
        turn = Queued(worker, tokens, work)
        self._queues.setdefault(worker, _Queue()).add(turn, self._clock())
        if self.on_change is not None:
            self.on_change()
        return turn

    def remove(self, turn: Queued) -> None:
        """Give back exactly what was added: the worker has answered, or never will."""
        queue = self._queues[turn.worker]
        queue.remove(turn, self._clock())
        if not queue.turns:
            del self._queues[turn.worker]
        if self.on_change is not None:
            self.on_change()
