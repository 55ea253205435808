"""The scheduler of searches: chooses those of the next step, and bounds those that wait.

It follows Trinity's pool (section 3.3). Prefill searches are ordered by deadline, decode searches
by arrival. Prefill goes first, and decode gets a share of the work while both stages have
searches. There are neither lanes nor vectors here: time and the running searches are passed in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from ppd.errors import Overloaded

MAX_RESERVED = 0.9  # decode keeps the rest
_ROUNDING = 1e-9  # ten tenths must add up to a slot


class Stage(StrEnum):
    """The stage of a request that waits for a search.

    A prefill search delays the first token. A decode search runs while tokens are streamed.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Controls:
    """The parameter that the control loop adjusts.

    Attributes:
        reserved: share of the work that is prefill's while both stages have searches, 0 to
            ``MAX_RESERVED``. Decode is sure of the rest.
    """

    reserved: float = MAX_RESERVED


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one step.

    Attributes:
        slots: maximum number of searches.
        work: maximum number of expansions; one search may exceed it alone.
        each: maximum expansions of one search.
        mixed: whether searches of both stages share the step. On a core, which serves one search
            after the other, a prefill search would wait for the decode searches beside it.
    """

    slots: int
    work: float
    each: float
    mixed: bool

    def work_of(self, ticket: Ticket) -> float:
        """The expansions of a search in this step, as estimated."""
        return min(ticket.steps_left, self.each)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The maximum number of searches that wait, per stage.

    Attributes:
        prefill: searches of prefill.
        decode: searches of decode.
    """

    prefill: int = 2048
    decode: int = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """One search, as the scheduler tracks it.

    Attributes:
        stage: the stage that waits for the search.
        arrived_s: when the search arrived.
        deadline_s: when its result is due.
        steps_left: estimated steps to its end; the engine updates it.
        order: its number in the order of arrival, set when it is offered.
    """

    stage: Stage
    arrived_s: float
    deadline_s: float
    steps_left: float
    order: int = field(default=-1, init=False)


@dataclass(slots=True)
class _Step:
    """A step while its searches are chosen."""

    room: Room
    free_lanes: int
    chosen: list[Ticket] = field(default_factory=list)
    work: float = 0.0

    def fits(self, work: float) -> bool:
        """Whether there is room for a search; the first one always fits."""
        if not self.chosen:
            return True
        return len(self.chosen) < self.room.slots and self.work + work <= self.room.work

    def add(self, ticket: Ticket, work: float) -> None:
        self.chosen.append(ticket)
        self.work += work


class Scheduler:
    """Queues searches and chooses those of each step.

    Args:
        bounds: the maximum number of searches that wait.
        controls: the initial controls.
        step_s: returns the current duration of one step of a search.
    """

    def __init__(self, bounds: Bounds, controls: Controls, step_s: Callable[[], float]) -> None:
        self.bounds = bounds
        self.controls = controls
        self._step_s = step_s
        self._prefill: list[tuple[float, int, Ticket]] = []  # a heap, by deadline
        self._decode: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap, of all that wait or waited
        self._waiting: dict[Stage, set[int]] = {stage: set() for stage in Stage}  # orders
        self._orders = count()
        self._owed = 0.0  # expansions that decode is behind its share

    def waiting(self, stage: Stage) -> int:
        """The number of searches of a stage that wait."""
        return len(self._waiting[stage])

    def all_waiting(self) -> int:
        """The number of searches that wait."""
        return sum(map(len, self._waiting.values()))

    def offer(self, ticket: Ticket) -> None:
        """Queue one search.

        Raises:
            Overloaded: the queue of its stage is full.
        """
        self.offer_all([ticket])

    def offer_all(self, tickets: Sequence[Ticket]) -> None:
        """Queue all of the searches, or none.

        Raises:
            Overloaded: the queue of a stage has no room for them.
        """
        for stage, bound in (
            (Stage.PREFILL, self.bounds.prefill),
            (Stage.DECODE, self.bounds.decode),
        ):
            new = [ticket for ticket in tickets if ticket.stage is stage]
            waiting = self.waiting(stage)
            if new and waiting + len(new) > bound:
                clears_s = waiting * new[0].steps_left * self._step_s()
                raise Overloaded(
                    f"{waiting} {stage} searches are waiting and {bound} may; {len(new)} came",
                    retry_after_s=max(1.0, math.ceil(clears_s)),
                    code="queue_full",
                )
        for ticket in tickets:
            ticket.order = next(self._orders)
            self._waiting[ticket.stage].add(ticket.order)
            heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.order, ticket))
            if ticket.stage is Stage.PREFILL:
                heapq.heappush(self._prefill, (*_urgency(ticket), ticket))
            else:
                self._decode.append(ticket)

    def expired(self, now_s: float, max_count: int) -> list[Ticket]:
        """Dequeue up to ``max_count`` waiting searches whose deadline has passed."""
        late: list[Ticket] = []
        while (len(late) < max_count and self._deadlines) and (
            self._deadlines[0][0] <= now_s or not self._waits(self._deadlines[0][2])
        ):
            ticket = heapq.heappop(self._deadlines)[2]
            if self._waits(ticket):
                self._waiting[ticket.stage].remove(ticket.order)
                late.append(ticket)
        self._drop_gone()
        return late

    def choose(self, room: Room, free_lanes: int, running: Sequence[Ticket]) -> list[Ticket]:
        """Choose the searches of the next step, and dequeue those that begin.

        Args:
            room: the room of the step.
            free_lanes: maximum number of searches that may begin.
            running: searches that have begun and are not finished.

        Returns:
            The chosen searches, both running and new.
        """
        step = _Step(room, free_lanes)
        begun = {
            Stage.PREFILL: deque(sorted(_of(running, Stage.PREFILL), key=_urgency)),
            Stage.DECODE: deque(sorted(_of(running, Stage.DECODE), key=_arrival)),
        }
        is_contested = all(self._head(stage, begun[stage], free_lanes) for stage in Stage)
        if is_contested:
            self._fill(step, Stage.DECODE, begun[Stage.DECODE], self._owed)
        for stage in (Stage.PREFILL, Stage.DECODE):
            if room.mixed or not step.chosen or step.chosen[0].stage is stage:
                self._fill(step, stage, begun[stage])
        self._owed = self._still_owed(step) if is_contested else 0.0
        return step.chosen

    def _fill(
        self, step: _Step, stage: Stage, begun: deque[Ticket], max_work: float = math.inf
    ) -> None:
        """Add the searches of a stage to a step, in their order, while they fit."""
        while (head := self._head(stage, begun, step.free_lanes)) is not None:
            work = step.room.work_of(head)
            if work > max_work + _ROUNDING or not step.fits(work):
                return
            max_work -= work
            step.add(head, work)
            if begun and head is begun[0]:
                begun.popleft()
            else:
                step.free_lanes -= 1
                self._waiting[stage].remove(head.order)
                self._drop_gone()

    def _head(self, stage: Stage, begun: deque[Ticket], free_lanes: int) -> Ticket | None:
        """The next search of a stage, among those that have begun and, with a lane, that wait."""
        first = begun[0] if begun else None
        if stage is Stage.DECODE:
            return first or (self._decode[0] if free_lanes and self._decode else None)
        if not free_lanes or not self._prefill:
            return first
        if first is not None and _urgency(first) < self._prefill[0][:2]:
            return first
        return self._prefill[0][2]

    def _still_owed(self, step: _Step) -> float:
        """The expansions that decode is owed after a step for which both stages had searches."""
        room, of_decode = step.room, sum(map(step.room.work_of, _of(step.chosen, Stage.DECODE)))
        share = 1.0 - min(self.controls.reserved, MAX_RESERVED)
        owed = self._owed + share * step.work - of_decode
        return min(max(owed, 0.0), share * room.work + room.each)  # it is not saved up

    def _waits(self, ticket: Ticket) -> bool:
        return ticket.order in self._waiting[ticket.stage]

    def _drop_gone(self) -> None:
        """Drop expired searches from the head of each queue; others are dropped later."""
        while self._prefill and not self._waits(self._prefill[0][2]):
            heapq.heappop(self._prefill)
        while self._decode and not self._waits(self._decode[0]):
            self._decode.popleft()


def _of(tickets: Sequence[Ticket], stage: Stage) -> Iterator[Ticket]:
    return (ticket for ticket in tickets if ticket.stage is stage)


def _urgency(ticket: Ticket) -> tuple[float, int]:
    """The order of prefill searches: by deadline, then by arrival."""
    return ticket.deadline_s, ticket.order


def _arrival(ticket: Ticket) -> int:
    """The order of decode searches."""
    return ticket.order
