"""KV events: workers publish what their caches store and drop, if they are told to.

SGLang's ``--kv-events-config`` (``disaggregation/kv_events.py``, 0.5.21): batches in msgpack over
ZeroMQ, numbered. A block that is stored names the ``session_id`` of its request, which this
router sets to the conversation's name: so no token need be known here. Nothing depends on
events: where some are missed, a worker that has dropped a conversation refuses it, as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ppd.evictions import Evictions

from ..seeing.metrics import Metrics
from .cluster import WorkerPool
from .handshake import Publisher
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

_DEVICE = ("GPU", None)  # SGLang's name of the tier that is searched first, on a CPU too
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000  # a host that has vanished is found out


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int]
    block_size: int
    medium: str | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    at_s: float
    events: list[_Stored | _Removed | _Cleared]


_BATCHES = msgspec.msgpack.Decoder(_Batch)


class _ElsewhereToo(Exception):
    """KV that is dropped may be kept in another tier: there is nothing to learn."""


class Hearing:
    """What one worker publishes, put into its ``evictions``."""

    def __init__(self, worker: Worker, metrics: Metrics) -> None:
        self._worker = worker
        self._labels = worker.role, worker.url
        self._metrics = metrics
        self._evictions = worker.evictions = Evictions()
        self._next: int | None = None
        self._is_well = True

    def heard(self, number: int, payload: bytes) -> None:
        """One batch. What cannot be read is as good as missed.

        Raises:
            _ElsewhereToo: the worker has a lower tier.
        """
        missed = "" if self._next in (None, number) else f"{self._next} was next, {number} came"
        self._next = number + 1
        if missed:
            self._missed(missed)
        try:
            for event in _BATCHES.decode(payload).events:
                self._take(event)
        except (msgspec.MsgspecError, OverflowError) as error:  # hashes have 64 bits
            self._missed(str(error))
        else:
            self._is_well = self._is_well or not missed

    def _take(self, event: _Stored | _Removed | _Cleared) -> None:
        if isinstance(event, _Cleared):
            self._evictions.cleared()
        elif event.medium not in _DEVICE:
            raise _ElsewhereToo(event.medium)
        elif isinstance(event, _Removed):
            tokens = self._evictions.removed(event.block_hashes)
            self._metrics.kv_evicted.labels(*self._labels).inc(tokens)
        elif (session := _session(event.session_id)) is not None:
            self._evictions.stored(session, event.block_hashes, event.block_size)

    def _missed(self, why: str) -> None:
        self._evictions.forget()
        self._metrics.kv_events_missed.labels(*self._labels).inc()
        if self._is_well:  # once, not for each of them
            logger.warning("KV events of %s were missed: %s", self._worker.url, why)
        self._is_well = False


def _session(name: str | None) -> int | None:
    """The conversation's number; None for who is not this router's."""
    try:
        return None if name is None else int(name, 16)
    except ValueError:
        return None


@asynccontextmanager
async def listening(pool: WorkerPool, metrics: Metrics) -> AsyncIterator[None]:
    """All workers of the pool that publish are heard while the context is open."""
    listeners = _Listeners(metrics)
    for worker in pool.workers:
        listeners.follow(worker)
    pool.met, pool.parted = listeners.follow, listeners.leave
    try:
        yield
    finally:
        await listeners.close()


class _Listeners:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._context: Any = None  # zmq.asyncio.Context, if anybody publishes
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, worker: Worker) -> None:
        """From now on; anew, if it was heard before."""
        self.leave(worker)
        publisher = worker.handshake.publisher
        if publisher is None or not self._can_hear(worker, publisher):
            return
        worker.publishes = False
        self._tasks[worker] = asyncio.create_task(self._listen(worker, publisher))

    def leave(self, worker: Worker) -> None:
        worker.evictions = worker.publishes = None
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for worker in list(self._tasks):
            self.leave(worker)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _can_hear(self, worker: Worker, publisher: Publisher) -> bool:
        if publisher.ranks != 1:
            logger.warning(
                "%s publishes the KV events of %d data-parallel caches: not followed",
                *(worker.url, publisher.ranks),
            )
            return False
        if self._context is None:
            try:
                import zmq.asyncio
            except ImportError:
                logger.warning(
                    "%s publishes KV events: to hear them, pip install 'sglang-ppd[kv-events]'",
                    worker.url,
                )
                return False
            self._context = zmq.asyncio.Context()
        return True

    async def _listen(self, worker: Worker, publisher: Publisher) -> None:
        import zmq

        host = urlsplit(worker.url).hostname or ""
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            socket.subscribe(publisher.topic)
            told = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(told)  # before it can connect
            watching = asyncio.create_task(self._watch(worker, monitor))
            try:
                socket.connect(f"{address}:{publisher.port}")
                hearing = Hearing(worker, self._metrics)
                while True:
                    frames = await socket.recv_multipart()
                    hearing.heard(int.from_bytes(frames[-2]), frames[-1])
            except zmq.ZMQError as error:
                logger.warning("the KV events of %s cannot be heard: %s", worker.url, error)
                worker.evictions = None
            except _ElsewhereToo as tier:
                worker.evictions = worker.publishes = None
                logger.warning(
                    "%s keeps KV in %s, too: what its device drops may still be there, so "
                    "evictions are not learned from it",
                    *(worker.url, tier),
                )
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                socket.disable_monitor()

    async def _watch(self, worker: Worker, monitor: Any) -> None:
        """Say when events stop coming, and when they come."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while True:
            told = await recv_monitor_message(monitor)
            worker.publishes = told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if worker.publishes:
                logger.info("hearing the KV events of %s", worker.url)
            else:
                logger.warning("the KV events of %s have stopped", worker.url)
