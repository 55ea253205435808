"""The scheduler of searches: chooses those of the next step, and bounds those that wait.

It follows Trinity's pool (section 3.3). Prefill searches are ordered by deadline, decode searches
by arrival. Prefill goes first, and decode gets a share of the work while both stages have
searches. There are neither lanes nor vectors here: time and the running searches are passed in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Generic, TypeVar

from ppd.errors import Overloaded

MAX_RESERVED = 0.9  # decode keeps the rest
_ROUNDING = 1e-9  # ten tenths must add up to a slot


class Stage(StrEnum):
    """The stage of a request that waits for a search.

    A prefill search delays the first token. A decode search runs while tokens are streamed.
    """

    PREFILL = "prefill"
    DECODE = "decode"


_PREFILL = Stage.PREFILL  # an enum's attribute is slow to look up (Python 3.11)


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
        waits: whether it is queued.
    """

    stage: Stage
    arrived_s: float
    deadline_s: float
    steps_left: float
    order: int = field(default=-1, init=False)
    waits: bool = field(default=False, init=False)


T = TypeVar("T", bound=Ticket)


@dataclass(slots=True)
class _Step(Generic[T]):
    """A step while its searches are chosen."""

    room: Room
    free_lanes: int
    chosen: list[T] = field(default_factory=list)
    work: float = 0.0

    def add(self, ticket: T, most: float = math.inf) -> bool:
        """Add a search if it fits; the first one always does.

        Args:
            ticket: the search.
            most: maximum work of the step with it, whatever its room is.
        """
        room, work = self.room, self.work + self.room.work_of(ticket)
        if work > most + _ROUNDING:
            return False
        if self.chosen and (work > room.work or len(self.chosen) >= room.slots):
            return False
        self.chosen.append(ticket)
        self.work = work
        return True

    def begin(self, ticket: T, most: float = math.inf) -> bool:
        """Add a search that takes a free lane, if it fits."""
        if not self.add(ticket, most):
            return False
        self.free_lanes -= 1
        return True


class Scheduler(Generic[T]):
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
        self._prefill: list[tuple[float, int, T]] = []  # a heap, by deadline
        # Decode searches leave one of these queues first, and the other when they reach its head.
        self._decode: deque[T] = deque()
        self._decode_deadlines: list[tuple[float, int, T]] = []  # a heap
        self._decode_count = 0
        self._orders = count()
        self._owed = 0.0  # expansions that decode is behind its share

    def waiting(self, stage: Stage) -> int:
        """The number of searches of a stage that wait."""
        return len(self._prefill) if stage is _PREFILL else self._decode_count

    def all_waiting(self) -> int:
        """The number of searches that wait."""
        return len(self._prefill) + self._decode_count

    def offer(self, ticket: T) -> None:
        """Queue one search.

        Raises:
            Overloaded: the queue of its stage is full.
        """
        self.offer_all([ticket])

    def offer_all(self, tickets: Sequence[T]) -> None:
        """Queue all of the searches, or none.

        Raises:
            Overloaded: the queue of a stage has no room for them.
        """
        prefill = [ticket.stage for ticket in tickets].count(_PREFILL)
        decode = len(tickets) - prefill
        if prefill and len(self._prefill) + prefill > self.bounds.prefill:
            raise self._overloaded(Stage.PREFILL, tickets, self.bounds.prefill)
        if decode and self._decode_count + decode > self.bounds.decode:
            raise self._overloaded(Stage.DECODE, tickets, self.bounds.decode)
        for ticket in tickets:
            order = ticket.order = next(self._orders)
            ticket.waits = True
            if ticket.stage is _PREFILL:
                heapq.heappush(self._prefill, (ticket.deadline_s, order, ticket))
            else:
                heapq.heappush(self._decode_deadlines, (ticket.deadline_s, order, ticket))
                self._decode.append(ticket)
        self._decode_count += decode

    def _overloaded(self, stage: Stage, tickets: Sequence[T], bound: int) -> Overloaded:
        waiting, new = self.waiting(stage), [one for one in tickets if one.stage is stage]
        clears_s = waiting * new[0].steps_left * self._step_s()
        return Overloaded(
            f"{waiting} {stage} searches are waiting and {bound} may; {len(new)} came",
            retry_after_s=max(1.0, math.ceil(clears_s)),
            code="queue_full",
        )

    def expired(self, now_s: float, max_count: int) -> list[T]:
        """Dequeue up to ``max_count`` waiting searches whose deadline has passed."""
        late: list[T] = []
        prefill, decode = self._prefill, self._decode_deadlines
        while len(late) < max_count:
            while decode and not decode[0][2].waits:
                heapq.heappop(decode)
            queue = prefill if prefill and (not decode or prefill[0] < decode[0]) else decode
            if not queue or queue[0][0] > now_s:
                break
            ticket = heapq.heappop(queue)[2]
            self._dequeued(ticket)
            late.append(ticket)
        return late

    def choose(self, room: Room, free_lanes: int, running: Sequence[T]) -> list[T]:
        """Choose the searches of the next step, and dequeue those that begin.

        Args:
            room: the room of the step.
            free_lanes: maximum number of searches that may begin.
            running: searches that have begun and are not finished.

        Returns:
            The chosen searches, both running and new.
        """
        step: _Step[T] = _Step(room, free_lanes)
        prefill: list[T] = []  # the first one is last
        decode: list[T] = []
        if running:
            prefill = sorted((t for t in running if t.stage is _PREFILL), key=_urgency)[::-1]
            decode = sorted((t for t in running if t.stage is not _PREFILL), key=_arrival)[::-1]
        has_prefill = bool(prefill or (free_lanes and self._prefill))
        is_contested = has_prefill and bool(decode or (free_lanes and self._decode))
        if is_contested and self._owed:
            self._fill_decode(step, decode, self._owed)
        of_decode = step.work
        if has_prefill and (room.mixed or not step.chosen):
            self._fill_prefill(step, prefill)
        of_prefill = step.work - of_decode
        if room.mixed or not step.chosen:
            self._fill_decode(step, decode)
        self._owed = self._still_owed(room, step.work, of_prefill) if is_contested else 0.0
        return step.chosen

    def _fill_prefill(self, step: _Step[T], begun: list[T]) -> None:
        """Add prefill searches to a step, in their order, while they fit.

        Args:
            step: the step.
            begun: the running ones, the first one last.
        """
        queue = self._prefill
        while True:
            may_begin = bool(queue) and step.free_lanes > 0
            if begun and not (may_begin and queue[0][:2] < _urgency(begun[-1])):
                if not step.add(begun[-1]):
                    return
                begun.pop()
            elif may_begin and step.begin(queue[0][2]):
                self._dequeued(heapq.heappop(queue)[2])
            else:
                return

    def _fill_decode(self, step: _Step[T], begun: list[T], max_work: float = math.inf) -> None:
        """Add decode searches to a step, in their order, while they fit and have ``max_work``."""
        most = step.work + max_work
        while begun and step.add(begun[-1], most):
            begun.pop()
        queue = self._decode
        while not begun and queue and step.free_lanes and step.begin(queue[0], most):
            self._dequeued(queue.popleft())

    def _still_owed(self, room: Room, work: float, of_prefill: float) -> float:
        """The expansions that decode is owed after a step for which both stages had searches."""
        reserved = min(self.controls.reserved, MAX_RESERVED)
        owed = self._owed + of_prefill - reserved * work
        return min(max(owed, 0.0), (1.0 - reserved) * room.work + room.each)  # it is not saved up

    def _dequeued(self, ticket: T) -> None:
        """Count a search that no longer waits; drop those from the head of decode's queue."""
        ticket.waits = False
        if ticket.stage is _PREFILL:
            return
        self._decode_count -= 1
        while self._decode and not self._decode[0].waits:
            self._decode.popleft()


def _urgency(ticket: Ticket) -> tuple[float, int]:
    """The order of prefill searches: by deadline, then by arrival."""
    return ticket.deadline_s, ticket.order


def _arrival(ticket: Ticket) -> int:
    """The order of decode searches."""
    return ticket.order
