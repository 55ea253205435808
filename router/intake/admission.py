"""Admission: which requests are served now, which wait, and which are refused for now.

Waiting requests are admitted tenant by tenant in turn, each tenant's in the order of arrival. When
the queue is full, a new request takes the place of one of a tenant that has more of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ppd.errors import Overloaded

from ..config.limits import AdmissionLimits
from ..observability.metrics import Metrics

_PATIENCE = 0.5  # share of the longest wait after which a request is no longer overtaken
_MIN_RETRY_S = 1.0  # of a Retry-After header


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    since_s: float
    decided: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def admitted(self) -> bool:
        return self.decided.done() and self.decided.result()


class Admission:
    """Admits requests within limits on their number and on KV.

    Args:
        has_room: whether a decode worker has KV for so many tokens.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        has_room: Callable[[int], bool],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self._has_room = has_room
        self._metrics = metrics
        self._clock = clock
        self._in_flight = 0
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._waiting = 0
        self._placing = False  # a request was admitted, and has not been sent yet

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    def enters(self, tokens: int) -> bool:
        """Admit a request at once, if there is room and none waits; then ``leave`` must follow."""
        if self._waiting or not self._may_enter(tokens):
            return False
        self._in_flight += 1
        return True

    async def enter(self, tenant: str, tokens: int) -> None:
        """Wait until a request is admitted; ``leave`` must follow.

        Args:
            tenant: its sender.
            tokens: of KV that it will need.

        Raises:
            Overloaded: too many requests wait, or this one has waited too long.
        """
        if self.enters(tokens):
            return
        limits, now_s = self.limits, self._clock()
        if self._waiting >= limits.max_waiting and not self._displace(tenant):
            raise self._full()
        one = _Waiting(tokens, now_s)
        self._queues.setdefault(tenant, deque()).append(one)
        self._waiting += 1
        self.admit_next()  # the room may be too small for those before it only
        try:
            async with asyncio.timeout(limits.max_wait_s):
                await asyncio.shield(one.decided)
        except TimeoutError:
            if not one.decided.done():
                self._metrics.refused_entry.labels("deadline").inc()
                raise Overloaded(
                    f"no room for the request within {limits.max_wait_s:g} s",
                    retry_after_s=limits.max_wait_s,
                ) from None
        except asyncio.CancelledError:
            if one.admitted:
                self.leave()
            raise
        finally:
            if one.admitted:
                asyncio.get_running_loop().call_soon(self._placed)
            elif not one.decided.done():
                self._give_up(tenant, one)
            self._metrics.waited.of().observe(self._clock() - one.since_s)
        if not one.admitted:
            raise self._full()

    def _displace(self, tenant: str) -> bool:
        """Refuse the newest request of the tenant with most of them, to make room for ``tenant``.

        Not where both would then have as many: they would only take each other's places.
        """
        most = max(self._queues, key=lambda name: len(self._queues[name]), default=tenant)
        if len(self._queues.get(most, ())) <= len(self._queues.get(tenant, ())) + 1:
            return False
        self._queues[most].pop().decided.set_result(False)
        self._waiting -= 1
        return True

    def _full(self) -> Overloaded:
        self._metrics.refused_entry.labels("queue_full").inc()
        message = f"{self._waiting} requests are waiting, which is as many as may"
        return Overloaded(message, retry_after_s=self._longest_wait_s(self._clock()))

    def leave(self) -> None:
        """An admitted request has ended."""
        self._in_flight -= 1
        if self._waiting:
            self.admit_next()

    def admit_next(self) -> None:
        """Admit the next request if there is room; tenants take turns.

        One at a time: how much room is left is known when the last one has been sent. A request
        that fits overtakes those that do not, until they have waited for half their time.
        """
        if self._placing:
            return
        patient_since_s = self._clock() - _PATIENCE * self.limits.max_wait_s
        for tenant, queue in self._queues.items():
            one = queue[0]
            if self._may_enter(one.tokens):
                self._admit(tenant, queue.popleft())
                return
            if one.since_s <= patient_since_s:
                return

    def _admit(self, tenant: str, one: _Waiting) -> None:
        self._dequeued(tenant)
        self._in_flight += 1
        self._placing = True
        one.decided.set_result(True)

    def _placed(self) -> None:
        """The admitted request has been sent, or is gone."""
        self._placing = False
        self.admit_next()

    def _dequeued(self, tenant: str) -> None:
        """A request has left its tenant's queue; the other tenants' turn comes first."""
        self._waiting -= 1
        if self._queues[tenant]:
            self._queues.move_to_end(tenant)
        else:
            del self._queues[tenant]

    def _may_enter(self, tokens: int) -> bool:
        limits = self.limits
        if self._placing or (limits.max_in_flight and self._in_flight >= limits.max_in_flight):
            return False
        return not limits.kv_headroom or self._in_flight == 0 or self._has_room(tokens)

    def _give_up(self, tenant: str, one: _Waiting) -> None:
        self._queues[tenant].remove(one)
        self._dequeued(tenant)
        self.admit_next()  # it may have stood before others that fit

    def _longest_wait_s(self, now_s: float) -> float:
        since_s = min((queue[0].since_s for queue in self._queues.values()), default=now_s)
        return max(_MIN_RETRY_S, math.ceil(now_s - since_s))
