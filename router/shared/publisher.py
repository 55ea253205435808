"""Writes this router's records to the shared store, in batches and in the background.

A record waits in a bounded queue until the store has taken it. A request adds one element to the
queue, and nothing else of the store is on its path.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ppd.prefix import Digest, PrefixChain
from ppd.sessions import Turn
from ppd.shared_load import SharedLoad, entry_id
from ppd.shared_records import Batch, DrainRecord, SharedTurn, encode

from .clock import StoreClock
from .metrics import SharedMetrics
from .problems import Side, StoreError, StoreStatus

if TYPE_CHECKING:  # it needs redis
    from .store import Store

_INTERVAL_S = 0.05  # between two writes; the first record after a pause is written at once
_MAX_TURNS = 128  # of a batch: bounds how long a reader is busy with it
BEAT_S = 1.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # pauses after failures in a row


class Publisher:
    """The queue of records, and the task that writes them.

    Args:
        store: that is written to.
        origin: names this router.
        store_clock: the store's time.
        status: of the store.
        metrics: of the store.
        load: tokens of this router that are not answered.
        max_records: that wait; beyond them the oldest are dropped.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        origin: bytes,
        store_clock: StoreClock,
        status: StoreStatus,
        metrics: SharedMetrics,
        load: SharedLoad,
        max_records: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._origin = origin
        self._store_clock = store_clock
        self._status = status
        self._metrics = metrics
        self._load = load
        self._max_records = max_records
        self._clock = clock
        self._beats = True  # the load is written although it has not changed
        self._turns: deque[SharedTurn] = deque()  # no chains of prefixes, which hold prompts
        self._drains: dict[str, DrainRecord] = {}  # by URL; the last of each worker
        self._deleted: deque[str] = deque(maxlen=max_records)  # names of responses
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._turns)

    def publish(self, model: str, chain: PrefixChain, turn: Turn, after: Digest | None) -> None:
        """Queue a finished turn.

        Args:
            model: that served it.
            chain: prefixes of its input.
            turn: what is known of it.
            after: digest of the turn that it continued.
        """
        turns = self._turns
        turns.append(SharedTurn(chain.end, turn, after, chain.anchor, self._clock(), model))
        if len(turns) > self._max_records:
            turns.popleft()
            self._metrics.sent.add("dropped")
        self._wake.set()

    def publish_drain(self, drain: DrainRecord) -> None:
        """Queue an operation on a worker."""
        self._drains[drain.url] = drain
        self._wake.set()

    def publish_deleted(self, name: str) -> None:
        """Queue the deletion of a stored response."""
        self._deleted.append(name)
        self._wake.set()

    def wake(self) -> None:
        """Write soon: the load of this router has changed."""
        self._wake.set()

    async def beat_forever(self) -> None:
        """Let the other routers see again and again that this one is there."""
        while True:
            self._beats = True
            self._wake.set()
            await asyncio.sleep(BEAT_S)

    async def run_forever(self) -> None:
        """Write what is queued, again and again."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                wrote = self._waiting
                if wrote:
                    await self._write()
            except StoreError as error:
                self._wake.set()
                self._status.failed(Side.WRITE, error)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            if wrote:
                self._status.worked(Side.WRITE)
                failures = 0
            if self._turns:
                self._wake.set()
            if len(self._turns) < _MAX_TURNS:
                await asyncio.sleep(_INTERVAL_S)

    async def flush(self, limit_s: float) -> None:
        """Write all that is queued, as long as the store takes it in time."""
        try:
            async with asyncio.timeout(limit_s):
                while self._turns or self._drains or self._deleted:
                    await self._write()
        except TimeoutError:
            pass  # the rest is lost with this process, and costs its conversations a remote turn
        except StoreError as error:
            self._status.failed(Side.WRITE, error)

    @property
    def _waiting(self) -> bool:
        records = self._turns or self._drains or self._deleted
        return bool(records or self._beats or self._load.changed)

    async def _write(self) -> None:
        """Write one batch; it leaves the queue when the store has taken it.

        Raises:
            StoreError: the store has not taken it.
        """
        now_ms = await self._store_clock.now_ms(self._store)
        count = min(len(self._turns), _MAX_TURNS)
        turns = tuple(self._turns.popleft() for _ in range(count))
        drains = tuple(self._drains.values())
        deleted = tuple(self._deleted)
        loads = self._load.publish() if self._beats or self._load.changed else None
        batch = Batch(turns=turns, drains=drains, deleted=deleted, loads=loads)
        try:
            name = await self._store.append(self._origin, encode(batch, self._clock()), now_ms)
        except BaseException:
            self._turns.extendleft(reversed(turns))
            while len(self._turns) > self._max_records:
                self._turns.popleft()
                self._metrics.sent.add("dropped")
            raise
        if loads is not None:
            self._beats = False
            self._load.written(entry_id(name), self._clock())
        self._drains = {url: one for url, one in self._drains.items() if one not in drains}
        for _ in deleted:
            self._deleted.popleft()
        self._metrics.sent.add("written", more=count)
