"""Applies what the attempts at a request say of workers: breakers, probes, refusals."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ppd.contract import Role
from ppd.effects import Abandon, Cause, Effect, Failure, Finish, Note, Relay
from ppd.placement import WorkerView

from ..observability.metrics import Metrics
from .registry import WorkerRegistry
from .worker import Worker

logger = logging.getLogger("ppd.router.turns")


class WorkerHealth:
    """Holds successes and failures for or against workers.

    Args:
        registry: probes workers.
        metrics: count failures and refusals.
    """

    def __init__(self, registry: WorkerRegistry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics

    def note(self, effect: Effect) -> None:
        """Record the success or failure of a worker that an effect names."""
        credited = None
        if type(effect) is Relay or type(effect) is Note or type(effect) is Finish:
            credited = effect.credited
        if credited is not None:
            worker_of(credited).breaker.succeeded()
        elif type(effect) is Finish and effect.blamed is not None:
            self.blame(effect.blamed)
        elif (type(effect) is Note or type(effect) is Abandon) and effect.worker is not None:
            self._note_failure(effect.worker, effect.reason, effect.blamed)

    def credit(self, view: WorkerView) -> None:
        """Note that a worker has done its part."""
        worker_of(view).breaker.succeeded()

    def blame(self, view: WorkerView) -> None:
        """Count a failure against a worker."""
        worker = worker_of(view)
        was_open = worker.breaker.open
        worker.breaker.failed()
        if worker.breaker.open and not was_open:
            logger.error("%s fails request after request: left alone for a while", worker.name)

    async def settle(self, effect: Abandon) -> None:
        """Take a worker that is down out of service, note a refusal, probe what may be dead."""
        worker, reason = worker_of(effect.worker), effect.reason
        if reason is not None and effect.down:
            self._registry.mark_dead(worker.server, reason.error.message)
        elif reason is not None and effect.local:
            self._note_refusal(worker, reason)
        if effect.probe:
            servers = {worker_of(view).server for view in effect.probe}
            probes = (self._registry.check(server) for server in servers)
            await asyncio.gather(*probes)

    def _note_failure(self, view: WorkerView, reason: Failure | None, blamed: bool) -> None:
        worker = worker_of(view)
        if reason is not None:
            is_transfer = reason.cause is Cause.TRANSFER
            is_prefill = worker.role is Role.PREFILL and reason.error.status >= 500
            if is_transfer:
                self._metrics.transfer_errors.labels(worker.role).inc()
            if is_prefill:
                self._metrics.prefill_errors.inc()
            if is_transfer or is_prefill:
                logger.warning("%s leg failed on %s: %s", worker.role, worker.name, reason.error)
        if blamed:
            self.blame(worker)

    def _note_refusal(self, worker: Worker, reason: Failure) -> None:
        """A decode worker did not take a local turn."""
        if (refusal := reason.refusal) is not None:
            self._metrics.refused.labels(refusal.reason).inc()
            logger.warning("local turn refused by %s: %s", worker.name, refusal)
            worker.server.note_flushes(refusal.flushes)
        elif reason.unpatched:
            logger.error("%s no longer offers local prefill", worker.url)
            worker.server.handshake = replace(worker.handshake, local_prefill=False)


def worker_of(view: WorkerView) -> Worker:
    """The router's worker behind a view of the core's."""
    assert isinstance(view, Worker), "the router's plans name its own workers"
    return view
