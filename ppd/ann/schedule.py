"""Which searches take part in the next step: prefill by slack, decode in order, both in bounds.

After Trinity's pool (section 3.3). A step has a few slots; a share of them is reserved for prefill,
and whoever does not use his share gives it away at once. Knows neither lanes nor vectors: time and
what runs come in as values.
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

MAX_RESERVED = 0.9  # decode keeps the rest, whatever is flushed
_ROUNDING = 1e-9  # ten tenths are a slot


class Stage(StrEnum):
    """Where in a request's life a search is asked for.

    Prefill's is on the way to the first token; decode's hides behind tokens that are there.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Controls:
    """What the control loop moves.

    Attributes:
        reserved: share of slots that is prefill's, 0 to ``MAX_RESERVED``.
        flush_s: a prefill search that has been there for longer goes before any decode.
    """

    reserved: float = 0.5
    flush_s: float = 0.002


@dataclass(frozen=True, slots=True)
class Bounds:
    """Searches that may wait."""

    prefill: int = 2048
    decode: int = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """One search as the scheduler sees it.

    Attributes:
        steps_left: an estimate; whoever runs it keeps it up to date.
        order: given when it is offered.
    """

    stage: Stage
    arrived_s: float
    deadline_s: float
    steps_left: float
    order: int = field(default=-1, init=False)


class Scheduler:
    """
    Args:
        step_s: what a step of one search takes now.
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
        return len(self._waiting[stage])

    def all_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def offer(self, ticket: Ticket) -> None:
        """Let it wait.

        Raises:
            Overloaded: as many wait as may.
        """
        self.offer_all([ticket])

    def offer_all(self, tickets: Sequence[Ticket]) -> None:
        """Let all of them wait, or none.

        Raises:
            Overloaded: too many wait.
        """
        for stage, most in (
            (Stage.PREFILL, self.bounds.prefill),
            (Stage.DECODE, self.bounds.decode),
        ):
            more = [one for one in tickets if one.stage is stage]
            waiting = self.waiting(stage)
            if more and waiting + len(more) > most:
                clears_s = waiting * more[0].steps_left * self._step_s()
                raise Overloaded(
                    f"{waiting} {stage} searches are waiting and {most} may; {len(more)} came",
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

    def expired(self, now_s: float, most: int) -> list[Ticket]:
        """Waiting searches whose deadline has passed, at most so many; they no longer wait."""
        late: list[Ticket] = []
        while (len(late) < most and self._deadlines) and (
            self._deadlines[0][0] <= now_s or not self._waits(self._deadlines[0][2])
        ):
            one = heapq.heappop(self._deadlines)[2]
            if self._waits(one):
                self._waiting[one.stage].remove(one.order)
                late.append(one)
        self._drop_gone()
        return late

    def choose(
        self, now_s: float, slots: int, free_lanes: int, running: Sequence[Ticket]
    ) -> list[Ticket]:
        """The searches of the next step, at most ``slots``; those that waited no longer do.

        Args:
            free_lanes: how many may begin.
            running: those that have begun and are not finished.
        """
        waiting = {stage: self.waiting(stage) for stage in Stage}
        prefill = [one for one in running if one.stage is Stage.PREFILL]
        prefill.sort(key=lambda one: (self._latest_start_s(one), one.order))
        decode = [one for one in running if one.stage is Stage.DECODE]
        decode.sort(key=lambda one: one.order)
        of_prefill = min(slots, len(prefill) + min(free_lanes, waiting[Stage.PREFILL]))
        of_decode = min(slots, len(decode) + min(free_lanes, waiting[Stage.DECODE]))
        if of_prefill and of_decode:
            of_prefill, of_decode = self._shares(now_s, slots, prefill, of_prefill, of_decode)
        chosen: list[Ticket] = []
        for ready in (self._next_prefill, self._next_decode):
            share = of_prefill if ready == self._next_prefill else of_decode
            mine = prefill if ready == self._next_prefill else decode
            taken, began = ready(mine, share, free_lanes)
            free_lanes -= began
            chosen += taken
        if len(chosen) < slots:  # the last lane went to the one stage, and the other has no use
            taken_up = set(map(id, chosen))
            rest = [one for one in (*prefill, *decode) if id(one) not in taken_up]
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
        """Slots of each, when both could use some. Fractions are kept for the next step."""
        reserved = min(self.controls.reserved, MAX_RESERVED)
        self._prefill_credit += reserved * slots
        self._decode_credit += (1.0 - MAX_RESERVED) * slots
        owed = int(self._prefill_credit + _ROUNDING)
        least = min(int(self._decode_credit + _ROUNDING), of_decode)
        flushed = self._flushed(now_s, prefill, of_prefill)
        prefill_slots = min(of_prefill, max(owed, flushed), slots - least)
        decode_slots = min(of_decode, slots - prefill_slots)
        prefill_slots = min(of_prefill, slots - decode_slots)
        # Nobody saves up what he did not use.
        self._prefill_credit = min(max(self._prefill_credit - prefill_slots, 0.0), 1.0)
        self._decode_credit = min(max(self._decode_credit - decode_slots, 0.0), 1.0)
        return prefill_slots, decode_slots

    def _flushed(self, now_s: float, running: Sequence[Ticket], most: int) -> int:
        """Prefill searches that have been there for too long, or will be late."""
        since_s = now_s - self.controls.flush_s
        late = sum(
            one.arrived_s <= since_s or self._latest_start_s(one) <= now_s for one in running
        )
        for latest_start_s, _, one in self._prefill[:most]:  # near the least slack
            late += one.arrived_s <= since_s or latest_start_s <= now_s
        return min(late, most)

    def _next_prefill(
        self, running: list[Ticket], share: int, free_lanes: int
    ) -> tuple[list[Ticket], int]:
        """Those with the least slack, begun or not."""
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
        """Those that came first; who has begun came before who has not."""
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
        """The first of each queue waits; others may have expired, and are found out in time."""
        while self._prefill and not self._waits(self._prefill[0][2]):
            heapq.heappop(self._prefill)
        while self._decode and not self._waits(self._decode[0]):
            self._decode.popleft()

    def _latest_start_s(self, ticket: Ticket) -> float:
        """Slack, but for the present time, which is the same for all."""
        return ticket.deadline_s - ticket.steps_left * self._step_s()
