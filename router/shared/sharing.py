"""What a router shares with the others: finished turns, and drains of workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ppd.backlog import Backlog
from ppd.prefix import Digest, PrefixChain
from ppd.sessions import SessionIndex, Turn
from ppd.shared_load import SharedLoad
from ppd.shared_records import Batch

from ..config.shared import SharedConfig
from ..workers.registry import WorkerRegistry
from ..workers.worker import Worker
from .clock import StoreClock
from .drains import DrainSharing
from .metrics import SharedMetrics
from .problems import Side, StoreError, StoreProblem, StoreStatus
from .publisher import Publisher
from .responses import SharedResponses
from .subscriber import Subscriber

if TYPE_CHECKING:  # it needs redis
    from .sealing import Sealing
    from .store import ResponseRecords, Store

Share = Callable[[PrefixChain, Turn, Digest | None], None]

logger = logging.getLogger("ppd.router.shared")

_UPKEEP_S = 5.0
_FLUSH_S = 1.0
_VISIBLE_S = 0.2  # twice the time in which records are visible: a loop may be busy meanwhile
_SILENT_S = 5.0  # several beats of a publisher


@dataclass(frozen=True, slots=True)
class SealedRecords:
    """Stored responses in the store, and their encryption."""

    records: ResponseRecords
    sealing: Sealing


class Sharing:
    """The shared state of one router process.

    Args:
        config: the options.
        store: the connections.
        ttl_s: lifetime of a record.
        registry: the workers.
        metrics: of the store.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
        sealed: where stored responses are, and their encryption; None: they are not shared.
        forget: called with the name of a stored response that was deleted at another router.

    Attributes:
        responses: the stored responses; None if they are not shared.
        publisher: of finished turns.
        drains: of workers.
        load: tokens of all routers that are not answered.
    """

    def __init__(
        self,
        *,
        config: SharedConfig,
        store: Store,
        ttl_s: float,
        registry: WorkerRegistry,
        metrics: SharedMetrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        sealed: SealedRecords | None = None,
        forget: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._forget = forget
        self._config = config
        self._store = store
        self._indices: dict[str, SessionIndex] = {}
        self._registry = registry
        self.load = load = SharedLoad(_VISIBLE_S, _SILENT_S)
        self._metrics = metrics
        self._clock = clock
        self._status = StoreStatus(config.url, clock)
        self._reconciled = asyncio.Event()  # the drains, for the first time
        self._store_clock = StoreClock(clock)
        origin = secrets.token_hex(8)
        self.publisher = Publisher(
            store,
            origin.encode(),
            self._store_clock,
            self._status,
            metrics,
            load,
            config.queue_records,
            clock,
        )
        self._subscriber = Subscriber(
            store,
            origin.encode(),
            ttl_s,
            self._store_clock,
            self._status,
            metrics,
            load,
            self.apply,
            clock,
        )
        self.drains = DrainSharing(registry, origin, self.publisher.publish_drain, wall_clock)
        self.responses: SharedResponses | None = None
        if sealed is not None:
            self.responses = SharedResponses(
                *(sealed.records, sealed.sealing, self._status, metrics),
                self.publisher.publish_deleted,
                clock,
            )
        self._sealed = sealed

    def serve(self, model: str, index: SessionIndex, backlog: Backlog) -> Share:
        """Share what belongs to a model that this router serves.

        Args:
            model: its name.
            index: its turns, to which those of other routers are added.
            backlog: tokens that its workers have not answered.

        Returns:
            What queues a finished turn for the other routers.
        """
        self._indices[model] = index
        self.load.follow(backlog)
        backlog.on_change = self.publisher.wake
        return partial(self.publisher.publish, model)

    def problems(self) -> set[StoreProblem]:
        """Return the present problems of the store."""
        return self._status.present()

    def tasks(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the work of the background tasks."""
        yield self.publisher.run_forever()
        yield self.publisher.beat_forever()
        yield self._subscriber.run_forever()
        yield self._upkeep_forever()
        if self.responses is not None:
            yield self.responses.run_forever()

    async def catch_up(self) -> None:
        """Wait until the stored records are applied, but no longer than configured.

        A store that fails is not waited for.
        """
        applied = asyncio.create_task(self._applied())
        failing = asyncio.create_task(self._status.failure.wait())
        limit_s = self._config.catch_up_s
        try:
            done, _ = await asyncio.wait(
                (applied, failing), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            applied.cancel()
            failing.cancel()
            await asyncio.gather(applied, failing, return_exceptions=True)
        if applied in done:
            known = sum(map(len, self._indices.values()))
            logger.info("sharing by %s: %d turns are known", self._config.url, known)
        elif failing not in done:
            logger.warning(
                "the shared store has more records than could be read in %g s (catch_up_s): "
                "the rest is read while requests are served",
                limit_s,
            )

    async def _applied(self) -> None:
        await self._subscriber.caught_up.wait()
        await self._reconciled.wait()

    async def close(self) -> None:
        """Write what is queued, and close the connections."""
        await self.publisher.flush(_FLUSH_S)
        if self.responses is not None and self._sealed is not None:
            await self.responses.flush(_FLUSH_S)
            await self._sealed.records.close()
        await self._store.close()

    def show(self) -> None:
        """Set the gauges, before the metrics are read."""
        self._metrics.queue.set(len(self.publisher))
        self._metrics.routers.set(self.load.routers)
        present = self.problems()
        for problem in StoreProblem:
            self._metrics.problems.labels(problem).set(problem in present)

    def apply(self, batch: Batch, origin: bytes) -> None:
        """Apply the records of another router.

        Args:
            batch: the records.
            origin: names the other router.
        """
        now_s, merged, unserved = self._clock(), 0, 0
        if batch.loads is not None:
            self.load.read(origin, batch.loads, now_s)
        followed = {w.identity: w for w in self._registry.workers if w.evictions is not None}
        for shared in batch.turns:
            turn, index = shared.turn, self._indices.get(shared.model)
            if index is None:
                unserved += 1
                continue
            if not index.merge(
                shared.digest, shared.anchor, turn, shared.finished_at_s, now_s, shared.after
            ):
                continue
            merged += 1
            if followed:
                self._served(followed, turn.session, turn.home, turn.prefill_worker)
        self._metrics.received.add("merged", more=merged)
        self._metrics.received.add("older", more=len(batch.turns) - merged - unserved)
        self._metrics.received.add("unserved", more=unserved)
        self.drains.apply(batch.drains)
        for name in batch.deleted:
            self._forget(name)

    def _served(
        self, followed: dict[str, Worker], session: int, home: str, prefill: str | None
    ) -> None:
        """Record that workers have all of a conversation, whose events may not have arrived."""
        for identity in (home, prefill):
            worker = None if identity is None else followed.get(identity)
            if worker is not None and worker.evictions is not None:
                worker.evictions.served(session)

    async def _upkeep_forever(self) -> None:
        """Reconcile the drains, bound the store's memory, and find out whether it was emptied."""
        while True:
            try:
                await self._subscriber.check_epoch()
                await self._store_clock.read(self._store)
                await self.drains.reconcile(self._store)
                self._reconciled.set()
                await self._store.keep()
                size_bytes = await self._store.size_bytes()
                self._metrics.store_bytes.set(size_bytes)
                await self._store.shrink(size_bytes)
            except StoreError as error:
                self._status.failed(Side.UPKEEP, error)
            else:
                self._status.worked(Side.UPKEEP)
            if self.responses is not None:
                await self.responses.check()
            await asyncio.sleep(_UPKEEP_S)
