"""Which requests are let in now, which wait, and which are told to come again later.

Waiting requests are let in tenant by tenant in turn, each tenant's in the order they came.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ppd.errors import Overloaded

from .config import AdmissionLimits
from .metrics import Metrics

_AGAIN_S = 1.0  # the least that anybody is told to wait


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    since_s: float
    let_in: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


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
        if self._waiting >= limits.max_waiting:
            self._metrics.refused_entry.labels("queue_full").inc()
            message = f"{self._waiting} requests are waiting, which is as many as may"
            raise Overloaded(message, retry_after_s=self._longest_wait_s(now_s))
        one = _Waiting(tokens, now_s)
        self._queues.setdefault(tenant, deque()).append(one)
        self._waiting += 1
        try:
            async with asyncio.timeout(limits.max_wait_s):
                await asyncio.shield(one.let_in)
        except TimeoutError:
            if not one.let_in.done():
                self._metrics.refused_entry.labels("deadline").inc()
                raise Overloaded(
                    f"no room for the request within {limits.max_wait_s:g} s",
                    retry_after_s=limits.max_wait_s,
                ) from None
        except asyncio.CancelledError:
            if one.let_in.done():
                self.leave()
            raise
        finally:
            if not one.let_in.done():
                self._give_up(tenant, one)
            self._metrics.waited.of().observe(self._clock() - one.since_s)

    def leave(self) -> None:
        """A request that was let in has ended."""
        self._in_flight -= 1
        if self._waiting:
            self.look()

    def look(self) -> None:
        """There may be room again."""
        while self._waiting:
            tenant, queue = next(iter(self._queues.items()))
            if not self._may_enter(queue[0].tokens):
                return
            one = queue.popleft()
            self._waiting -= 1
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            self._in_flight += 1
            one.let_in.set_result(None)

    def _may_enter(self, tokens: int) -> bool:
        limits = self.limits
        if limits.max_in_flight and self._in_flight >= limits.max_in_flight:
            return False
        return not limits.kv_headroom or self._in_flight == 0 or self._has_room(tokens)

    def _give_up(self, tenant: str, one: _Waiting) -> None:
        queue = self._queues[tenant]
        queue.remove(one)
        self._waiting -= 1
        if not queue:
            del self._queues[tenant]
        self.look()  # it may have stood before others that fit

    def _longest_wait_s(self, now_s: float) -> float:
        since_s = min((queue[0].since_s for queue in self._queues.values()), default=now_s)
        return max(_AGAIN_S, math.ceil(now_s - since_s))
