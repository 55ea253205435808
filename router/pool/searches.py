"""Searches between the event loop and the engines' threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ppd.ann.control import ControlLoop, Feedback, Move
from ppd.ann.engine import Ending, Found, Pace, Search, steps_of
from ppd.ann.lanes import Backend
from ppd.ann.schedule import Scheduler, Stage
from ppd.ann.space import Rows
from ppd.errors import IndexFileError, Overloaded, RequestError

from .collection import Collection, Plan
from .config import PoolConfig
from .filters import Filter
from .metrics import PoolMetrics
from .requests import Asked
from .workers import Workers

_WAITS_KEPT = 1000  # for their 95th percentile
_MATCHING = 4  # filters at a time
_UNANSWERED: dict[type[BaseException], str] = {
    Overloaded: "refused",
    IndexFileError: Ending.FAILED,
}
_MOVED_HERE = 32  # queries, in the event loop; some 40 us each


@dataclass(slots=True, eq=False)
class _Request:
    """Searches that are answered together."""

    missing: int
    found: dict[int, Found]
    done: asyncio.Future[None]


class Searches:
    """
    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: PoolConfig,
        backend: Backend,
        metrics: PoolMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self.pace = Pace()
        self.scheduler = Scheduler(config.bounds, config.controls, lambda: self.pace.expansion_s)
        self.control = ControlLoop(config.aims, config.controls)
        self.broken: str | None = None
        self._requests: dict[int, tuple[_Request, int]] = {}
        self._waits_ms: list[float] = []
        self._steps_from_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        # A filter that takes long goes on when nobody waits for it any more: not in the threads
        # that answers need.
        self._matching = ThreadPoolExecutor(_MATCHING, "filter")
        self.workers = Workers(
            config.engines,
            self.scheduler,
            self.pace,
            config.step_shape,
            backend,
            clock,
            self._deliver,
            self._fail,
        )

    def start(self) -> None:
        """In the event loop that searches are awaited in."""
        self._loop = asyncio.get_running_loop()
        self.workers.start()

    def stop(self) -> None:
        self.workers.stop()
        self._matching.shutdown(wait=False, cancel_futures=True)

    def timeout_s(self, asked: Asked) -> float:
        return (asked.timeout_ms or self._config.default_timeout_ms) / 1e3

    async def plan(self, collection: Collection, asked: Asked, wanted: Filter | None) -> Plan:
        """What to go through; with a filter, the disk may be read for it."""
        itopk = asked.itopk or max(self._config.default_itopk, asked.limit)
        if wanted is None:
            return collection.plan(itopk, None)  # of memory alone
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._matching, collection.plan, itopk, wanted)

    def note_late(self, asked: Asked) -> None:
        """Its time was over before it could begin."""
        self._metrics.searches.labels(asked.stage, Ending.DEADLINE).inc(asked.count)

    def note_answered(self, asked: Asked, arrived_s: float) -> None:
        self._metrics.seconds.labels(asked.stage).observe(self._clock() - arrived_s)

    async def search(
        self, collection: Collection, asked: Asked, plan: Plan, vectors: Rows, arrived_s: float
    ) -> list[Found]:
        """One result for each vector, in order; all of one target.

        Args:
            vectors: (n, dimensions), of the collection's dimension and finite.
            arrived_s: when the request came, from which its deadline counts: its texts may have
                been embedded since, and its filter matched.

        Raises:
            Overloaded: too many searches wait.
            IndexFileError: the engines have failed.
        """
        if self.broken is not None:
            raise IndexFileError(f"the engines have failed: {self.broken}")
        bounds = self._config.bounds
        most = bounds.prefill if self._queue_of(asked) is Stage.PREFILL else bounds.decode
        if vectors.shape[0] > most:
            raise RequestError(
                f"{vectors.shape[0]} queries at once, {most} may wait: send several requests",
                param="vectors",
            )
        began_s = self._clock()
        deadline_s = arrived_s + self.timeout_s(asked)
        try:
            made = await self._made(plan, asked, vectors, began_s, deadline_s)
            found = await self._found(made)
            while plan.among is None and (short := _short(found, plan, asked.limit)):
                # In thread: it may look at all rows.
                plan = await asyncio.to_thread(collection.wider, plan)
                now_s = self._clock()
                again = await self._made(plan, asked, vectors[short], now_s, deadline_s)
                try:
                    wider = await self._found(again)
                except Overloaded:
                    wider = [replace(found[i], ending=Ending.DEADLINE) for i in short]
                for i, one in zip(short, wider, strict=True):
                    better = one.ending is Ending.COMPLETE
                    found[i] = one if better else replace(found[i], ending=Ending.DEADLINE)
        except (Overloaded, IndexFileError, asyncio.CancelledError) as error:
            ending = _UNANSWERED.get(type(error), "disconnected")
            self._metrics.searches.labels(asked.stage, ending).inc(vectors.shape[0])
            raise
        for one in found:
            self._metrics.searches.labels(asked.stage, one.ending).inc()
        if asked.stage is Stage.PREFILL:
            self._waits_ms.append((self._clock() - began_s) * 1e3)
            del self._waits_ms[:-_WAITS_KEPT]
        return found

    async def _found(self, searches: list[Search]) -> list[Found]:
        """Of each, in order.

        Raises:
            Overloaded: too many searches wait.
            IndexFileError: the engines have failed.
        """
        assert self._loop is not None, "started"
        request = _Request(len(searches), {}, self._loop.create_future())
        for i, one in enumerate(searches):
            self._requests[id(one)] = request, i
        try:
            self.workers.submit(searches)
            await request.done
        finally:
            for one in searches:
                self._requests.pop(id(one), None)
        return [request.found[i] for i in range(len(searches))]

    def feed_back(self, kv_link_use: float, decode_stall: float, wait_ms: float | None) -> str:
        """One step of the control loop; says what it did. What comes before the interval is over is
        let go: a loop with many routers takes no larger steps."""
        if (now_s := self._clock()) < self._steps_from_s:
            return Move.STEADY
        self._steps_from_s = now_s + self._config.control_interval_s
        if wait_ms is None:
            waits = self._waits_ms
            wait_ms = float(np.percentile(waits, 95)) if waits else 0.0
            self._waits_ms = []
        move = self.control.step(Feedback(kv_link_use, wait_ms, decode_stall))
        self.workers.set_controls(self.control.controls)
        self._metrics.moves.labels(move).inc()
        return move

    async def _made(
        self,
        plan: Plan,
        asked: Asked,
        vectors: Rows,
        began_s: float,
        deadline_s: float,
    ) -> list[Search]:
        space = plan.target.snapshot.space
        if vectors.shape[0] > _MOVED_HERE:  # others' requests shall not wait for it
            moved = await asyncio.to_thread(space.queries, vectors)
        else:
            moved = space.queries(vectors)
        return [
            Search(
                self._queue_of(asked),
                began_s,
                deadline_s,
                steps_of(plan.itopk, plan.among),
                target=plan.target,
                query=moved[i : i + 1],
                itopk=max(plan.itopk, asked.limit),
                limit=asked.limit,
                among=plan.among,
            )
            for i in range(vectors.shape[0])
        ]

    def _queue_of(self, asked: Asked) -> Stage:
        return Stage.DECODE if self._config.single_queue else asked.stage

    def _deliver(self, found: list[Found]) -> None:
        """In an engine's thread."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: list[Found]) -> None:
        for one in found:
            if (entry := self._requests.get(id(one.search))) is None:
                continue  # whoever asked is gone
            request, number = entry
            if one.ending is Ending.FAILED:
                if not request.done.done():
                    request.done.set_exception(IndexFileError(one.error))
                continue
            request.found[number] = one
            request.missing -= 1
            if not request.missing and not request.done.done():
                request.done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """In an engine's thread."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(self._give_up, f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self.broken = why
        for request, _ in self._requests.values():
            if not request.done.done():
                request.done.set_exception(IndexFileError(f"the engines have failed: {why}"))


def _short(found: list[Found], plan: Plan, limit: int) -> list[int]:
    """Those that ended with fewer rows than they should have found."""
    should = min(limit, plan.findable)
    return [
        i
        for i, one in enumerate(found)
        if one.ending is Ending.COMPLETE and int((one.nodes >= 0).sum()) < should
    ]
