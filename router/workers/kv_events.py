"""KV events: workers publish what their caches store and drop, if they are told to.

SGLang's ``--kv-events-config`` (``disaggregation/kv_events.py``, 0.5.21): batches in msgpack over
ZeroMQ, numbered. A block that is stored names the ``session_id`` of its request, which this
router sets to the conversation's name: so no token need be known here. Nothing depends on
events: where some are missed, a worker that has dropped a conversation refuses it, as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from ppd.evictions import Evictions

from ..observability.metrics import Metrics
from .registry import WorkerRegistry
from .sglang import Publisher
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

_DEVICE = ("GPU", None)  # SGLang's name of the tier that is searched first, on a CPU too
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000  # a host that has vanished is found out
_PATIENCE_S = 15.0  # for a publisher that was told of and does not answer
_MAX_BYTES = 64 * 1024 * 1024  # of a message


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: Annotated[int, msgspec.Meta(gt=0)]
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


# Too few frames, no UTF-8, hashes above 64 bits, fields within fields without end.
_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_BATCHES = msgspec.msgpack.Decoder(_Batch)


class _ElsewhereToo(Exception):
    """KV that is dropped may be kept in another tier: there is nothing to learn."""


class KvEventSubscriber:
    """What one worker publishes, put into its ``evictions``."""

    def __init__(self, worker: Worker, metrics: Metrics) -> None:
        self._worker = worker
        self._labels = worker.role, worker.url
        self._metrics = metrics
        self._evictions = worker.evictions = Evictions()
        self._next: int | None = None
        self._is_well = True

    def heard(self, frames: Sequence[bytes]) -> None:
        """One batch: topic, number, payload. What cannot be read is as good as missed.

        Raises:
            _ElsewhereToo: the worker has a lower tier.
        """
        try:
            _, number_bytes, payload = frames
            number = int.from_bytes(number_bytes)
            missed = self._next not in (None, number)
            if missed:
                self._missed(f"{self._next} was next, {number} came")
            self._next = number + 1
            for event in _BATCHES.decode(payload).events:
                self._take(event)
        except _ElsewhereToo:
            raise
        except _UNREADABLE as error:
            self._missed(repr(error))
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
            blocks, parent = event.block_hashes, event.parent_block_hash
            self._evictions.stored(session, parent, blocks, event.block_size)

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
async def listening(pool: WorkerRegistry, metrics: Metrics) -> AsyncIterator[None]:
    """All workers of the pool that publish are heard while the context is open."""
    listeners = _Listeners(metrics)
    for worker in pool.workers:
        listeners.follow(worker)
    pool.met, pool.parted = listeners.follow, listeners.leave
    try:
        yield
    finally:
        pool.met = pool.parted = lambda _worker: None
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
        if publisher is None or worker.handshake.keeps_sessions:
            return
        if not self._can_hear(worker, publisher):
            return
        worker.publishes = False
        task = self._tasks[worker] = asyncio.create_task(self._listen(worker, publisher))
        task.add_done_callback(lambda task: self._ended(worker, task))

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

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if self._tasks.get(worker) is task:  # of itself
            self.leave(worker)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the KV events of %s are heard no more", worker.url, exc_info=error)

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
        with self._context.socket(zmq.SUB) as socket:
            # A name is looked up as SGLang's publisher binds: it never asks for IPv6.
            socket.setsockopt(zmq.IPV6, ":" in host)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            socket.subscribe(publisher.topic)
            told = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(told)  # before it can connect
            watching = asyncio.create_task(self._watch(worker, monitor))
            address = f"tcp://{f'[{host}]' if ':' in host else host}:{publisher.port}"
            waiting = asyncio.get_running_loop().call_later(_PATIENCE_S, _unheard, worker, address)
            try:
                socket.connect(address)
                hearing = KvEventSubscriber(worker, self._metrics)
                while True:
                    hearing.heard(await socket.recv_multipart())
                    await asyncio.sleep(0)  # what is there already is given without a pause
            except _ElsewhereToo as tier:
                logger.warning(
                    "%s keeps KV in %s, too: what its device drops may still be there, so "
                    "evictions are not learned from it",
                    *(worker.url, tier),
                )
            finally:
                waiting.cancel()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                socket.disable_monitor()
                monitor.close(linger=0)  # which its reader would keep

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


def _unheard(worker: Worker, address: str) -> None:
    if worker.publishes is False:
        logger.warning(
            "%s says it publishes KV events, but nothing answers at %s", worker.url, address
        )
