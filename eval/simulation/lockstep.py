"""The steps of a simulated server: the ranks of data parallelism begin and end each one together.

With DP attention a forward is collective. So a step takes as long as that of its slowest rank, and
a rank's append delays the decodes of all. A server without data parallelism has one rank. Steps in
which nothing changes are taken at once, in closed form. Time comes from the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .engine import Engine

Then = Callable[[float], None]


class Timer(Protocol):
    """Calls ``then`` at a time."""

    def __call__(self, at_ms: float, then: Then) -> None: ...


class Lockstep:
    """The steps of one server.

    Attributes:
        ranks: the schedulers that take them.
        timer: calls at a time.
    """

    def __init__(self, timer: Timer) -> None:
        self.ranks: list[Engine] = []
        self.timer = timer
        # The segment under way: steps that end together, whatever comes.
        self._epoch = 0
        self._idle = True
        self._ends_ms = 0.0
        self._run: tuple[float, int] | None = None  # of decode steps alone: start and number

    @property
    def decodes(self) -> bool:
        """Whether any rank has sequences that decode."""
        return any(rank.sequences for rank in self.ranks)

    def arrived(self, now_ms: float) -> None:
        """Have a rank's new work taken up: at once, or when the step under way ends."""
        if self._idle:
            self._next(now_ms)
        elif self._run is not None:
            self._cut(now_ms)

    def step_ends_ms(self, now_ms: float) -> float:
        """Return when the step under way ends; now, if there is none."""
        if self._idle:
            return now_ms
        if self._run is None:
            return self._ends_ms
        start_ms, _ = self._run
        return start_ms + self._decode_ms(self._begun(start_ms, now_ms))

    def stop(self, now_ms: float) -> int:
        """Stop for good.

        Returns:
            The decode steps that have ended, and that no rank has counted.
        """
        self._epoch += 1
        if self._run is None:
            return 0
        start_ms, planned = self._run
        return min(self._begun(start_ms, now_ms), planned) - 1

    def _begun(self, start_ms: float, now_ms: float) -> int:
        """How many steps of a run have begun: the slowest rank takes the fewest to get so far."""
        return min(rank.decode_steps(now_ms - start_ms) for rank in self.ranks if rank.sequences)

    def _decode_ms(self, steps: int) -> float:
        return max(rank.decode_ms(steps) for rank in self.ranks if rank.sequences)

    def _cut(self, now_ms: float) -> None:
        """End a run of decode steps with the step that is under way."""
        assert self._run is not None
        start_ms, steps = self._run
        begun = self._begun(start_ms, now_ms)
        if begun < steps:
            self._start_run(start_ms, begun)

    def _start_run(self, start_ms: float, steps: int) -> None:
        self._run = start_ms, steps
        self._at(start_ms + self._decode_ms(steps), partial(self._end_run, start_ms, steps))

    def _at(self, at_ms: float, then: Then) -> None:
        """``then`` at a time, unless the segment is replaced before."""
        self._ends_ms = at_ms
        self._epoch += 1
        epoch = self._epoch

        def guarded(now_ms: float) -> None:
            if epoch == self._epoch:
                then(now_ms)

        self.timer(at_ms, guarded)

    def _next(self, now_ms: float) -> None:
        """At the end of a step: what comes next."""
        self._run, self._idle, self._ends_ms = None, False, now_ms
        searches = [search for rank in self.ranks for search in rank.take_searches()]
        if searches:
            all_ms = max(ms for ms, _ in searches)
            self._at(now_ms + all_ms, partial(self._end_searches, searches, all_ms))
            return
        for rank in self.ranks:
            rank.admit(now_ms)
        if any(rank.wants_chunk for rank in self.ranks):
            ms = max(rank.begin_chunk() for rank in self.ranks)
            self._at(now_ms + ms, partial(self._end_mixed, ms))
        elif self.decodes:
            self._start_run(now_ms, int(min(rank.unchanged_steps for rank in self.ranks)))
        else:
            self._idle = True

    def _end_searches(self, ended: list[tuple[float, Then]], all_ms: float, now_ms: float) -> None:
        for rank in self.ranks:
            rank.busy_ms += all_ms
        for _, then in ended:
            then(now_ms)
        self._next(now_ms)

    def _end_mixed(self, ms: float, now_ms: float) -> None:
        decoded = self.decodes
        for rank in self.ranks:
            rank.end_chunk(ms, now_ms, beside_decodes=decoded)
        self._next(now_ms)

    def _end_run(self, start_ms: float, steps: int, now_ms: float) -> None:
        for rank in self.ranks:
            rank.end_decodes(now_ms - start_ms, steps, now_ms)
        self._next(now_ms)
