"""The scheduler of searches: chooses those of the next step, and bounds those that wait.

It follows Trinity's pool (section 3.3). Prefill searches are ordered by slack, decode searches by
arrival. A step has a few slots. A share of them is reserved for prefill. A stage that does not use
its share leaves it to the other one in the same step. There are neither lanes nor vectors here:
time and the running searches are passed in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from ppd.errors import Overloaded

MAX_RESERVED = 0.9  # decode keeps the rest, even during a flush
_ROUNDING = 1e-9  # ten tenths must add up to a slot


class Stage(StrEnum):
    """The stage of a request that waits for a search.

    A prefill search delays the first token. A decode search runs while tokens are streamed.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Controls:
    """The parameters that the control loop adjusts.

    Attributes:
        reserved: share of slots that is reserved for prefill, 0 to ``MAX_RESERVED``.
        flush_s: age at which a prefill search takes precedence over decode.
    """

    reserved: float = 0.5
    flush_s: float = 0.002


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
        self._prefill: list[tuple[float, int, Ticket]] = []  # a heap, by latest start
        self._decode: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap, of all that wait or waited
        self._waiting: dict[Stage, set[int]] = {stage: set() for stage in Stage}  # orders
        self._orders = count()
        self._prefill_credit = 0.0
        self._decode_credit = 0.0

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
                heapq.heappush(self._prefill, (self._latest_start_s(ticket), ticket.order, ticket))
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

    def choose(
        self, now_s: float, slots: int, free_lanes: int, running: Sequence[Ticket]
    ) -> list[Ticket]:
        """Choose the searches of the next step, and dequeue those that begin.

        Args:
            now_s: the current time.
            slots: maximum number of searches in the step.
            free_lanes: maximum number of searches that may begin.
            running: searches that have begun and are not finished.

        Returns:
            The chosen searches, both running and new.
        """
        waiting = {stage: self.waiting(stage) for stage in Stage}
        prefill = [ticket for ticket in running if ticket.stage is Stage.PREFILL]
        prefill.sort(key=lambda ticket: (self._latest_start_s(ticket), ticket.order))
        decode = [ticket for ticket in running if ticket.stage is Stage.DECODE]
        decode.sort(key=lambda ticket: ticket.order)
        of_prefill = min(slots, len(prefill) + min(free_lanes, waiting[Stage.PREFILL]))
        of_decode = min(slots, len(decode) + min(free_lanes, waiting[Stage.DECODE]))
        if of_prefill and of_decode:
            of_prefill, of_decode = self._shares(now_s, slots, prefill, of_prefill, of_decode)
        chosen: list[Ticket] = []
        for take in (self._next_prefill, self._next_decode):
            share = of_prefill if take == self._next_prefill else of_decode
            begun_tickets = prefill if take == self._next_prefill else decode
            taken, began = take(begun_tickets, share, free_lanes)
            free_lanes -= began
            chosen += taken
        if len(chosen) < slots:  # one stage took the last lane, the other cannot fill its share
            taken_up = set(map(id, chosen))
            rest = [ticket for ticket in (*prefill, *decode) if id(ticket) not in taken_up]
            chosen += rest[: slots - len(chosen)]
        return chosen

    def _shares(
        self,
        now_s: float,
        slots: int,
        prefill: Sequence[Ticket],
        of_prefill: int,
        of_decode: int,
    ) -> tuple[int, int]:
        """Divide the slots when both stages could use some; fractions carry over to the next step.

        Returns:
            The slots of prefill and of decode.
        """
        reserved = min(self.controls.reserved, MAX_RESERVED)
        self._prefill_credit += reserved * slots
        self._decode_credit += (1.0 - MAX_RESERVED) * slots
        reserved_slots = int(self._prefill_credit + _ROUNDING)
        min_decode = min(int(self._decode_credit + _ROUNDING), of_decode)
        flushed = self._flushed(now_s, prefill, of_prefill)
        prefill_slots = min(of_prefill, max(reserved_slots, flushed), slots - min_decode)
        decode_slots = min(of_decode, slots - prefill_slots)
        prefill_slots = min(of_prefill, slots - decode_slots)
        # Unused credit is not saved up: at most one slot carries over.
        self._prefill_credit = min(max(self._prefill_credit - prefill_slots, 0.0), 1.0)
        self._decode_credit = min(max(self._decode_credit - decode_slots, 0.0), 1.0)
        return prefill_slots, decode_slots

    def _flushed(self, now_s: float, running: Sequence[Ticket], max_count: int) -> int:
        """Count the prefill searches that are older than the flush timeout, or will be late."""
        since_s = now_s - self.controls.flush_s
        late = sum(
            ticket.arrived_s <= since_s or self._latest_start_s(ticket) <= now_s
            for ticket in running
        )
        for latest_start_s, _, ticket in self._prefill[:max_count]:  # roughly those of least slack
            late += ticket.arrived_s <= since_s or latest_start_s <= now_s
        return min(late, max_count)

    def _next_prefill(
        self, running: list[Ticket], share: int, free_lanes: int
    ) -> tuple[list[Ticket], int]:
        """Take the prefill searches with the least slack; returns them, and how many begin."""
        taken: list[Ticket] = []
        began = 0
        begun = deque(running)
        while len(taken) < share:
            may_begin = bool(self._prefill) and began < free_lanes
            if begun and not (
                may_begin
                and self._prefill[0][:2] < (self._latest_start_s(begun[0]), begun[0].order)
            ):
                taken.append(begun.popleft())
            elif may_begin:
                taken.append(self._begun(heapq.heappop(self._prefill)[2]))
                began += 1
            else:
                break
        return taken, began

    def _next_decode(
        self, running: list[Ticket], share: int, free_lanes: int
    ) -> tuple[list[Ticket], int]:
        """Take the oldest decode searches; returns them, and how many begin."""
        taken = running[:share]
        began = min(share - len(taken), free_lanes, self.waiting(Stage.DECODE))
        return taken + [self._begun(self._decode.popleft()) for _ in range(began)], began

    def _waits(self, ticket: Ticket) -> bool:
        return ticket.order in self._waiting[ticket.stage]

    def _begun(self, ticket: Ticket) -> Ticket:
        self._waiting[ticket.stage].remove(ticket.order)
        self._drop_gone()
        return ticket

    def _drop_gone(self) -> None:
        """Drop expired searches from the head of each queue; others are dropped later."""
        while self._prefill and not self._waits(self._prefill[0][2]):
            heapq.heappop(self._prefill)
        while self._decode and not self._waits(self._decode[0]):
            self._decode.popleft()

    def _latest_start_s(self, ticket: Ticket) -> float:
        """The latest time at which a search can begin and meet its deadline."""
        return ticket.deadline_s - ticket.steps_left * self._step_s()
