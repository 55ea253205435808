"""Subscriptions to the KV events of workers: what their caches store and remove.

A stored block carries the ``session_id`` of its request. The router sets it to the conversation's
name, so it needs no token ids here. Events are optional: if some are missed, a worker that has
evicted a conversation refuses its next local turn. The wire format is in ``sglang_events.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from ppd.errors import PpdError
from ppd.evictions import Evictions
from ppd.extras import install

from ..observability.metrics import Metrics
from .registry import WorkerRegistry
from .sglang import Publisher
from .sglang_events import (
    BlocksRemoved,
    CacheCleared,
    KvEvent,
    decode_kv_events,
    is_device_tier,
    split_kv_message,
)
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000  # they detect a host that has vanished
_CONNECT_WARNING_S = 15.0  # without a publisher after this time, a warning is logged
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class _LowerTierError(PpdError):
    """The worker has a lower cache tier, which may keep KV that its device removes."""


class KvEventSubscriber:
    """Applies the KV events of one worker to its ``evictions``."""

    def __init__(self, worker: Worker, metrics: Metrics) -> None:
        self._worker = worker
        self._labels = worker.role, worker.name
        self._metrics = metrics
        self._evictions = worker.evictions = Evictions()
        self._next_number: int | None = None
        self._in_order = True

    def receive(self, frames: Sequence[bytes]) -> None:
        """Apply one message; an unreadable one counts as missed.

        Args:
            frames: topic, number and payload.

        Raises:
            _LowerTierError: the worker has a lower cache tier.
        """
        try:
            number, payload = split_kv_message(frames)
            missed = self._next_number not in (None, number)
            if missed:
                self._record_missed(f"{self._next_number} was next, {number} came")
            self._next_number = number + 1
            for event in decode_kv_events(payload):
                self._apply(event)
        except (ValueError, OverflowError) as error:  # the latter: a hash above 64 bits
            self._record_missed(repr(error))
        else:
            self._in_order = self._in_order or not missed

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, CacheCleared):
            self._evictions.cleared()
        elif not is_device_tier(event.medium):
            raise _LowerTierError(event.medium)
        elif isinstance(event, BlocksRemoved):
            tokens = self._evictions.removed(event.block_hashes)
            self._metrics.kv_evicted.labels(*self._labels).inc(tokens)
        elif (session := _session(event.session_id)) is not None:
            blocks, parent = event.block_hashes, event.parent_block_hash
            self._evictions.stored(session, parent, blocks, event.block_size)

    def _record_missed(self, reason: str) -> None:
        self._evictions.forget()
        self._metrics.kv_events_missed.labels(*self._labels).inc()
        if self._in_order:  # one log line for a series of missed messages
            logger.warning("KV events of %s were missed: %s", self._worker.name, reason)
        self._in_order = False


def _session(name: str | None) -> int | None:
    """The conversation's number; None if this router did not set the name."""
    try:
        return None if name is None else int(name, 16)
    except ValueError:
        return None


@asynccontextmanager
async def kv_event_subscriptions(
    registry: WorkerRegistry, metrics_of: Callable[[Worker], Metrics]
) -> AsyncIterator[None]:
    """Subscribe to every publishing worker of the registry while the context is open.

    Args:
        registry: the workers.
        metrics_of: returns the metrics of a worker's model.
    """
    subscriptions = _Subscriptions(metrics_of)
    for worker in registry.workers:
        subscriptions.subscribe(worker)
    registry.on_join, registry.on_leave = subscriptions.subscribe, subscriptions.unsubscribe
    try:
        yield
    finally:
        registry.on_join = registry.on_leave = lambda _worker: None
        await subscriptions.close()


class _Subscriptions:
    """One task and one ZeroMQ socket for each worker that publishes KV events."""

    def __init__(self, metrics_of: Callable[[Worker], Metrics]) -> None:
        self._metrics_of = metrics_of
        self._context: Any = None  # zmq.asyncio.Context, made for the first publisher
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def subscribe(self, worker: Worker) -> None:
        """Subscribe to a worker's events; an earlier subscription is replaced."""
        self.unsubscribe(worker)
        publisher = worker.handshake.publisher
        if publisher is None or worker.handshake.keeps_sessions:
            return
        if publisher.ranks != worker.handshake.dp_size:
            logger.warning(
                "%s publishes the KV events of %d caches and has %d: they are not used",
                *(worker.url, publisher.ranks, worker.handshake.dp_size),
            )
            return
        if not self._open_context(worker):
            return
        worker.publishes = False
        task = self._tasks[worker] = asyncio.create_task(self._listen(worker, publisher))
        task.add_done_callback(lambda task: self._task_ended(worker, task))

    def unsubscribe(self, worker: Worker) -> None:
        """End a worker's subscription, if there is one."""
        worker.evictions = worker.publishes = None
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all subscriptions, and wait for their tasks."""
        for worker in list(self._tasks):
            self.unsubscribe(worker)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _task_ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if self._tasks.get(worker) is task:  # it was not cancelled by unsubscribe
            self.unsubscribe(worker)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "the subscription to the KV events of %s failed", worker.name, exc_info=error
            )

    def _open_context(self, worker: Worker) -> bool:
        """Open the ZeroMQ context if it is not open; False if the library is not installed."""
        if self._context is None:
            try:
                import zmq.asyncio
            except ImportError:
                logger.warning(
                    "%s publishes KV events: to use them, %s", worker.url, install("kv-events")
                )
                return False
            self._context = zmq.asyncio.Context()
        return True

    async def _listen(self, worker: Worker, publisher: Publisher) -> None:
        import zmq

        host = urlsplit(worker.url).hostname or ""
        with self._context.socket(zmq.SUB) as socket:
            # SGLang's publisher binds to IPv4 only, so a host name must resolve to IPv4.
            socket.setsockopt(zmq.IPV6, ":" in host)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            socket.subscribe(publisher.topic)
            monitored = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(monitored)  # before the socket can connect
            watching = asyncio.create_task(self._watch_connection(worker, monitor))
            port = publisher.port + worker.rank
            address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
            warning = asyncio.get_running_loop().call_later(
                _CONNECT_WARNING_S, _warn_if_not_connected, worker, address
            )
            try:
                socket.connect(address)
                subscriber = KvEventSubscriber(worker, self._metrics_of(worker))
                while True:
                    subscriber.receive(await socket.recv_multipart())
                    await asyncio.sleep(0)  # recv_multipart does not yield if a message waits
            except _LowerTierError as tier:
                logger.warning(
                    "%s keeps KV in %s, too: blocks that its device removes may still be there, "
                    "so its KV events show no evictions",
                    *(worker.url, tier),
                )
            finally:
                warning.cancel()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                socket.disable_monitor()
                monitor.close(linger=0)  # disable_monitor leaves this end open

    async def _watch_connection(self, worker: Worker, monitor: Any) -> None:
        """Set ``worker.publishes`` and log when the connection opens and closes."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while True:
            message = await recv_monitor_message(monitor)
            worker.publishes = message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if worker.publishes:
                logger.info("subscribed to the KV events of %s", worker.name)
            else:
                logger.warning("the KV events of %s have stopped", worker.name)


def _warn_if_not_connected(worker: Worker, address: str) -> None:
    if worker.publishes is False:
        logger.warning(
            "%s should publish KV events, but nothing answers at %s", worker.name, address
        )
