"""Which requests are let in now, which wait, and which are told to come again later.

Waiting requests are let in tenant by tenant in turn, each tenant's in the order they came. Where no
more may wait, who comes takes the place of one of a tenant that has more of them.
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

_PATIENCE = 0.5  # of the longest wait
_AGAIN_S = 1.0  # the least that anybody is told to wait


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    since_s: float
    told: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def let_in(self) -> bool:
        return self.told.done() and self.told.result()


class Admission:
    """
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
        self._placing = False  # one has been let in, and not been sent yet

    @property
    def waiting(self) -> int:
        return self._waiting

    async def enter(self, tenant: str, tokens: int) -> None:
        """Let a request in; whoever has been let in must ``leave``.

        Args:
            tokens: of KV that it will need.

        Raises:
            Overloaded: too many wait, or it has waited too long.
        """
        if not self._waiting and self._may_enter(tokens):
            self._in_flight += 1
            return
        limits, now_s = self.limits, self._clock()
        if self._waiting >= limits.max_waiting and not self._displace(tenant):
            raise self._full()
        one = _Waiting(tokens, now_s)
        self._queues.setdefault(tenant, deque()).append(one)
        self._waiting += 1
        self.look()  # the room may be too small for those before it only
        try:
            async with asyncio.timeout(limits.max_wait_s):
                await asyncio.shield(one.told)
        except TimeoutError:
            if not one.told.done():
                self._metrics.refused_entry.labels("deadline").inc()
                raise Overloaded(
                    f"no room for the request within {limits.max_wait_s:g} s",
                    retry_after_s=limits.max_wait_s,
                ) from None
        except asyncio.CancelledError:
            if one.let_in:
                self.leave()
            raise
        finally:
            if one.let_in:
                asyncio.get_running_loop().call_soon(self._placed)
            elif not one.told.done():
                self._give_up(tenant, one)
            self._metrics.waited.of().observe(self._clock() - one.since_s)
        if not one.let_in:
            raise self._full()

    def _displace(self, tenant: str) -> bool:
        """The newest request of the tenant with most of them makes room for one of ``tenant``, if
        that one still has no more then: they would only take each other's places."""
        most = max(self._queues, key=lambda name: len(self._queues[name]), default=tenant)
        if len(self._queues.get(most, ())) <= len(self._queues.get(tenant, ())) + 1:
            return False
        self._queues[most].pop().told.set_result(False)
        self._waiting -= 1
        return True

    def _full(self) -> Overloaded:
        self._metrics.refused_entry.labels("queue_full").inc()
        message = f"{self._waiting} requests are waiting, which is as many as may"
        return Overloaded(message, retry_after_s=self._longest_wait_s(self._clock()))

    def leave(self) -> None:
        """A request that was let in has ended."""
        self._in_flight -= 1
        if self._waiting:
            self.look()

    def look(self) -> None:
        """There may be room again: for the first request of a tenant, in the tenants' order.

        One after the other: how much room is left is known when the one before has been sent. A
        request that fits overtakes those that do not, until they have waited for half their time.
        """
        if self._placing:
            return
        patient_since_s = self._clock() - _PATIENCE * self.limits.max_wait_s
        for tenant, queue in self._queues.items():
            one = queue[0]
            if self._may_enter(one.tokens):
                self._let_in(tenant, queue.popleft())
                return
            if one.since_s <= patient_since_s:
                return

    def _let_in(self, tenant: str, one: _Waiting) -> None:
        self._took(tenant)
        self._in_flight += 1
        self._placing = True
        one.told.set_result(True)

    def _placed(self) -> None:
        """The request that was let in has been sent, or is gone."""
        self._placing = False
        self.look()

    def _took(self, tenant: str) -> None:
        """A request has left its tenant's queue; it is the others' turn."""
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
        self._took(tenant)
        self.look()  # it may have stood before others that fit

    def _longest_wait_s(self, now_s: float) -> float:
        since_s = min((queue[0].since_s for queue in self._queues.values()), default=now_s)
        return max(_AGAIN_S, math.ceil(now_s - since_s))
