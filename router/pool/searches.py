"""Searches from the event loop, which the engines' threads run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ppd.ann.control import ControlLoop, Feedback, Move
from ppd.ann.engine import Pace
from ppd.ann.lanes import Backend
from ppd.ann.schedule import Scheduler, Stage
from ppd.ann.searches import Ending, Found, Search, steps_of
from ppd.ann.space import Rows
from ppd.errors import IndexFileError, Overloaded, RequestError

from .collection import Collection, Plan
from .config import PoolConfig
from .filters import Filter
from .metrics import PoolMetrics
from .requests import FeedbackBody, SearchRequest
from .workers import Workers

_MAX_WAITS = 1000  # for their 95th percentile
_FILTER_THREADS = 4
_ENDINGS: dict[type[BaseException], str] = {
    Overloaded: "refused",
    IndexFileError: Ending.FAILED,
}
_MAX_INLINE = 32  # queries transformed in the event loop; each takes about 40 us


@dataclass(slots=True, eq=False)
class _Batch:
    """The searches of one request."""

    missing: int
    found: dict[int, Found]
    done: asyncio.Future[None]


class Searches:
    """The searches of a pool: their engines, deadlines, metrics and control loop.

    Args:
        config: of the pool.
        backend: that the engines search with.
        metrics: of the pool.
        clock: in seconds, monotonic.

    Attributes:
        pace: estimate of the time of an expansion.
        scheduler: that searches wait in.
        control: the control loop of the scheduler's settings.
        broken: why the engines have stopped; None while they run.
        workers: the engines' threads.
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
        self.scheduler: Scheduler[Search] = Scheduler(
            config.bounds, config.controls, lambda: self.pace.expansion_s
        )
        self.control = ControlLoop(config.aims, config.controls)
        self.broken: str | None = None
        self._batches: dict[int, tuple[_Batch, int]] = {}
        self._decode_waits_ms: list[float] = []
        self._steps_from_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        # A slow filter cannot be cancelled. It must not occupy the threads of other work.
        self._filter_threads = ThreadPoolExecutor(_FILTER_THREADS, "filter")
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
        """Start the engines. Searches must be awaited in the event loop of this call."""
        self._loop = asyncio.get_running_loop()
        self.workers.start()

    def stop(self) -> None:
        """Stop the engines; running searches do not end."""
        self.workers.stop()
        self._filter_threads.shutdown(wait=False, cancel_futures=True)

    def timeout_s(self, request: SearchRequest) -> float:
        """Return the time limit of a request."""
        return (request.timeout_ms or self._config.default_timeout_ms) / 1e3

    async def plan(
        self, collection: Collection, request: SearchRequest, row_filter: Filter | None
    ) -> Plan:
        """Return how to search a collection; with a filter it may read from disk."""
        itopk = request.itopk or max(self._config.default_itopk, request.limit)
        if row_filter is None:
            return collection.plan(itopk, None)  # reads memory only
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._filter_threads, collection.plan, itopk, row_filter)

    def note_late(self, request: SearchRequest) -> None:
        """Count a request whose deadline passed before its searches began."""
        self._metrics.searches.labels(request.stage, Ending.DEADLINE).inc(request.count)

    def note_answered(self, request: SearchRequest, arrived_s: float) -> None:
        """Record the latency of a request."""
        self._metrics.seconds.labels(request.stage).observe(self._clock() - arrived_s)

    async def search(
        self,
        collection: Collection,
        request: SearchRequest,
        plan: Plan,
        vectors: Rows,
        arrived_s: float,
    ) -> list[Found]:
        """Return a result for each vector, in order; all are of one target.

        Args:
            collection: that is searched.
            request: the request.
            plan: how to search.
            vectors: (n, dimensions), of the collection's dimension and finite.
            arrived_s: arrival of the request, from which its deadline counts. Its texts may have
                been embedded since, and its filter applied.

        Raises:
            Overloaded: too many searches wait.
            RequestError: the request has more vectors than searches may wait.
            IndexFileError: the engines have failed.
        """
        if self.broken is not None:
            raise IndexFileError(f"the engines have failed: {self.broken}")
        bounds = self._config.bounds
        bound = bounds.prefill if self._queue_of(request) is Stage.PREFILL else bounds.decode
        if vectors.shape[0] > bound:
            raise RequestError(
                f"{vectors.shape[0]} queries at once, {bound} may wait: send several requests",
                param="vectors",
            )
        began_s = self._clock()
        deadline_s = arrived_s + self.timeout_s(request)
        try:
            searches = await self._engine_searches(plan, request, vectors, began_s, deadline_s)
            found = await self._run(searches)
            while plan.among is None and (short := _short(found, plan, request.limit)):
                # In a thread: it may read all rows.
                plan = await asyncio.to_thread(collection.wider, plan)
                now_s = self._clock()
                retries = await self._engine_searches(
                    plan, request, vectors[short], now_s, deadline_s
                )
                try:
                    wider = await self._run(retries)
                except Overloaded:
                    wider = [replace(found[i], ending=Ending.DEADLINE) for i in short]
                for i, result in zip(short, wider, strict=True):
                    better = result.ending is Ending.COMPLETE
                    found[i] = result if better else replace(found[i], ending=Ending.DEADLINE)
        except (Overloaded, IndexFileError, asyncio.CancelledError) as error:
            ending = _ENDINGS.get(type(error), "disconnected")
            self._metrics.searches.labels(request.stage, ending).inc(vectors.shape[0])
            raise
        for result in found:
            self._metrics.searches.labels(request.stage, result.ending).inc()
        if request.stage is Stage.DECODE:
            self._decode_waits_ms.append((self._clock() - began_s) * 1e3)
            del self._decode_waits_ms[:-_MAX_WAITS]
        return found

    async def _run(self, searches: list[Search]) -> list[Found]:
        """Run searches, and return their results in order.

        Raises:
            Overloaded: too many searches wait.
            IndexFileError: the engines have failed.
        """
        assert self._loop is not None, "started"
        batch = _Batch(len(searches), {}, self._loop.create_future())
        for i, search in enumerate(searches):
            self._batches[id(search)] = batch, i
        try:
            self.workers.submit(searches)
            await batch.done
        finally:
            for search in searches:
                self._batches.pop(id(search), None)
        return [batch.found[i] for i in range(len(searches))]

    def feed_back(self, body: FeedbackBody) -> str:
        """Take one step of the control loop, and return its effect.

        Feedback within the interval after a step is ignored. So feedback from many routers does
        not make larger steps.
        """
        if (now_s := self._clock()) < self._steps_from_s:
            return Move.STEADY
        self._steps_from_s = now_s + self._config.control_interval_s
        wait_ms = body.decode_wait_p95_ms
        if wait_ms is None:
            waits = self._decode_waits_ms
            wait_ms = float(np.percentile(waits, 95)) if waits else 0.0
        self._decode_waits_ms = []
        move = self.control.step(Feedback(body.kv_link_use, wait_ms, body.token_ms))
        self.workers.set_controls(self.control.controls)
        self._metrics.moves.labels(move).inc()
        return move

    async def _engine_searches(
        self,
        plan: Plan,
        request: SearchRequest,
        vectors: Rows,
        began_s: float,
        deadline_s: float,
    ) -> list[Search]:
        space = plan.target.snapshot.space
        if vectors.shape[0] > _MAX_INLINE:  # must not block the event loop
            queries = await asyncio.to_thread(space.queries, vectors)
        else:
            queries = space.queries(vectors)
        return [
            Search(
                self._queue_of(request),
                began_s,
                deadline_s,
                steps_of(plan.itopk, plan.among),
                target=plan.target,
                query=queries[i : i + 1],
                itopk=max(plan.itopk, request.limit),
                limit=request.limit,
                among=plan.among,
            )
            for i in range(vectors.shape[0])
        ]

    def _queue_of(self, request: SearchRequest) -> Stage:
        return Stage.DECODE if self._config.single_queue else request.stage

    def _deliver(self, found: list[Found]) -> None:
        """Pass the call on to the event loop; runs in an engine's thread."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: list[Found]) -> None:
        for result in found:
            if (entry := self._batches.get(id(result.search))) is None:
                continue  # the request was cancelled
            batch, number = entry
            if result.ending is Ending.FAILED:
                if not batch.done.done():
                    batch.done.set_exception(IndexFileError(result.error))
                continue
            batch.found[number] = result
            batch.missing -= 1
            if not batch.missing and not batch.done.done():
                batch.done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Pass the call on to the event loop; runs in an engine's thread."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(self._fail_all, f"{type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        self.broken = reason
        for batch, _ in self._batches.values():
            if not batch.done.done():
                batch.done.set_exception(IndexFileError(f"the engines have failed: {reason}"))


def _short(found: list[Found], plan: Plan, limit: int) -> list[int]:
    """Return the numbers of the searches that returned fewer rows than there are."""
    expected = min(limit, plan.findable)
    return [
        i
        for i, result in enumerate(found)
        if result.ending is Ending.COMPLETE and int((result.nodes >= 0).sum()) < expected
    ]
