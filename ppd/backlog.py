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
    """A turn in a worker's queue.

    Attributes:
        has_answer: whether it is removed when it is computed; else it leaves the queue by plan.
    """

    worker: str
    tokens: int
    work: Work
    has_answer: bool = True


@dataclass(slots=True)
class _Plan:
    """When a turn came, and when it was to be computed and its KV sent."""

    came_s: float
    computed_s: float
    sent_s: float


@dataclass(slots=True)
class _Queue:
    """A worker's queue: it computes one prompt after the other, and sends their KV likewise.

    Attributes:
        turns: in the order in which they came.
        computed_s: when all will be computed.
        sent_s: when all KV will be sent.
        late_s: by which the plans of ``turns`` are behind.
        left: all work of the turns.
        unanswered: how many of the turns have no answer.
    """

    turns: dict[Queued, _Plan] = field(default_factory=dict)
    tokens: int = 0
    computed_s: float = 0.0
    sent_s: float = 0.0
    late_s: float = 0.0
    left: Work = NO_WORK
    unanswered: int = 0

    def add(self, turn: Queued, now_s: float) -> None:
        if self.turns:
            self._shift(max(0.0, self._first_is_late_s(now_s)))
        compute_ms, transfer_ms = turn.work
        self.left = Work(self.left.compute_ms + compute_ms, self.left.transfer_ms + transfer_ms)
        self.computed_s = max(self.computed_s, now_s) + compute_ms / 1e3
        self.sent_s = max(self.sent_s, self.computed_s) + transfer_ms / 1e3
        late_s = self.late_s
        self.turns[turn] = _Plan(now_s - late_s, self.computed_s - late_s, self.sent_s - late_s)
        self.tokens += turn.tokens
        self.unanswered += not turn.has_answer

    def expire(self, now_s: float) -> None:
        """Remove the first turns that have no answer, if they are computed and sent by plan."""
        while self.unanswered:
            first, plan = next(iter(self.turns.items()))
            if first.has_answer or plan.sent_s + self.late_s > now_s:
                return
            self._drop(first)

    def remove(self, turn: Queued, now_s: float) -> None:
        """Remove a turn. What the first one was late, or early, those behind it are, too.

        One that leaves from further behind is not computed: those behind it are earlier.
        """
        if next(iter(self.turns)) is turn:
            self._shift(self._first_is_late_s(now_s))
        else:
            self._plan_without(turn)
        self._drop(turn)
        self.computed_s = min(self.computed_s, now_s + self.left.compute_ms / 1e3)
        latest_s = max(self.computed_s, now_s) + self.left.transfer_ms / 1e3
        self.sent_s = min(self.sent_s, latest_s)

    def _drop(self, turn: Queued) -> None:
        del self.turns[turn]
        self.tokens -= turn.tokens
        self.unanswered -= not turn.has_answer
        compute_ms, transfer_ms = turn.work
        self.left = Work(self.left.compute_ms - compute_ms, self.left.transfer_ms - transfer_ms)

    def wait_ms(self, compute_ms: float, now_s: float) -> float:
        late_s = max(0.0, self._first_is_late_s(now_s))  # its answer is still to come
        computed_ms = 1e3 * (self.computed_s + late_s - now_s)
        sent_ms = 1e3 * (self.sent_s + late_s - now_s)
        return max(0.0, computed_ms, sent_ms - compute_ms)

    def _plan_without(self, turn: Queued) -> None:
        """Plan the turns behind one anew, as if it had not come."""
        behind, computed_s, sent_s = False, 0.0, 0.0
        for one, plan in self.turns.items():
            if one is turn:
                behind = True
                continue
            if behind:
                plan.computed_s = max(computed_s, plan.came_s) + one.work.compute_ms / 1e3
                plan.sent_s = max(sent_s, plan.computed_s) + one.work.transfer_ms / 1e3
            computed_s, sent_s = plan.computed_s, plan.sent_s
        self.computed_s, self.sent_s = computed_s + self.late_s, sent_s + self.late_s

    def _first_is_late_s(self, now_s: float) -> float:
        return now_s - (next(iter(self.turns.values())).sent_s + self.late_s)

    def _shift(self, by_s: float) -> None:
        self.late_s += by_s
        self.computed_s += by_s
        self.sent_s += by_s


class Backlog:
    """What all workers were sent to prefill, by identity: also appends on decode workers.

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
        now = [(worker, self._queue(worker)) for worker in list(self._queues)]
        return {worker: queue.tokens for worker, queue in now if queue and queue.tokens}

    def of(self, worker: str) -> int:
        """Tokens in a worker's queue."""
        queue = self._queue(worker)
        return 0 if queue is None else queue.tokens

    def wait_ms(self, worker: str, compute_ms: float) -> float:
        """Return how long a further turn waits, for the worker or then for its link.

        Args:
            worker: that prefills it.
            compute_ms: what it takes for that.
        """
        if (queue := self._queue(worker)) is None:
            return 0.0
        return queue.wait_ms(compute_ms, self._clock())

    def add(
        self, worker: str, tokens: int, work: Work = NO_WORK, *, has_answer: bool = True
    ) -> Queued:
        """Reserve a turn's tokens, and return what gives them back.

        Args:
            worker: that prefills it.
            tokens: that it computes.
            work: the time that it takes.
            has_answer: whether it is removed when it is computed. One that is removed much later
                counts for as long as it takes by ``work``.
        """
        assert tokens >= 0
        turn = Queued(worker, tokens, work, has_answer or work == NO_WORK)
        self._queue(worker)
        self._queues.setdefault(worker, _Queue()).add(turn, self._clock())
        if self.on_change is not None:
            self.on_change()
        return turn

    def remove(self, turn: Queued) -> None:
        """Give back exactly what was added: the worker has answered, or never will."""
        queue = self._queue(turn.worker)
        if queue is None or turn not in queue.turns:
            assert not turn.has_answer, "it was added once"
            return
        queue.remove(turn, self._clock())
        if not queue.turns:
            del self._queues[turn.worker]
        if self.on_change is not None:
            self.on_change()

    def _queue(self, worker: str) -> _Queue | None:
        """A worker's queue as it is now; None if it is empty."""
        queue = self._queues.get(worker)
        if queue is not None and queue.unanswered:
            queue.expire(self._clock())
            if not queue.turns:
                del self._queues[worker]
                return None
        return queue
