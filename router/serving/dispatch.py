"""Sending a request to its workers, on the decided route or on what is left of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from ppd.backlog import Backlog
from ppd.contract import LocalTerms, Role, parse_refusal
from ppd.decision import Decision, Reason, Route

from ..intake.inbound import Inbound
from ..observability.metrics import Metrics
from ..wire.client import Upstreams
from ..workers.registry import WorkerRegistry
from ..workers.worker import Worker
from .bodies import name_for, with_room, with_terms
from .context import RequestContext
from .holds import Promised, Queued, Spoken
from .left import Left
from .legs import Answer, Cause, Leg, LegFailed
from .telling import BothLegs, OneLeg

logger = logging.getLogger("ppd.router.turns")

# How SGLang 0.5.21 refuses what is neither remote nor, for want of the plugin, local. Only at
# the start of a message: validation errors repeat what a client has sent.
_UNPATCHED = "Invalid request: Disaggregated request received without bootstrap room"


class Dispatcher:
    """Opens the legs of a request.

    Args:
        clock: seconds, monotonic.
        new_room: a random bootstrap room below 2**63.
        escapes: without prefill worker, decode workers prefill whole prompts.
    """

    def __init__(
        self,
        *,
        upstreams: Upstreams,
        pool: WorkerRegistry,
        backlog: Backlog,
        metrics: Metrics,
        clock: Callable[[], float],
        new_room: Callable[[], int],
        decode_fallback: bool,
    ) -> None:
        self._upstreams = upstreams
        self._pool = pool
        self._backlog = backlog
        self._metrics = metrics
        self._clock = clock
        self._new_room = new_room
        self._left = Left(pool, decode_fallback)

    async def answer(self, context: RequestContext) -> Answer:
        """The decode worker's answer, on whichever route gives one.

        ``context.opened`` is what must be closed when it is over.
        """
        answer: Answer | None = None
        if context.decision.route is Route.LOCAL:
            answer = await self._local(context)
        while answer is None:
            if self._left.on_replica(context):
                answer = await self._replica(context)
            elif (decode := self._left.way_out(context)) is not None:
                answer = await self._without_prefill(context, decode)
            else:
                answer = await self._remote(context)
        if context.first_byte_s is None:
            context.first_byte_s = self._clock()
        return answer

    async def go_on(self, context: RequestContext, continued: Inbound) -> Answer:
        """The rest of a stream whose worker was lost, from another one.

        Raises:
            LegFailed, WorkerError: none has it.
        """
        context.close()
        begun = context.decision.route
        context.decision = Decision(
            Route.REPLICA if begun is Route.REPLICA else Route.REMOTE, Reason.RESUMED
        )
        context.inbound, context.prefill, context.retried = continued, None, False
        return await self.answer(context)

    async def prime(self, context: RequestContext, primer: Inbound, worker: Worker) -> None:
        """Have a stream's worker prefill what the stream shall go on behind.

        Raises:
            LegFailed: it did not.
        """
        if not worker.handshake.local_prefill:
            return
        spoken = Spoken(self._upstreams.loop)
        body = with_terms(primer, _terms(context), name_for(context, worker))
        leg = self._open(worker, context, body, OneLeg(worker, spoken).told)
        context.opened.append(leg)
        try:
            await spoken.future
        finally:
            leg.close()

    async def append(self, context: RequestContext, continued: Inbound, worker: Worker) -> Answer:
        """The rest of a stream behind something new, from the worker that has the stream so far;
        if it will not, from another one.

        Raises:
            LegFailed, WorkerError: none has it.
        """
        context.close()
        if not worker.handshake.local_prefill:
            return await self.go_on(context, continued)
        context.inbound = continued
        context.decision = Decision(Route.LOCAL, Reason.APPENDED)
        try:
            body = with_terms(continued, _terms(context), name_for(context, worker))
            return await self._spoken(worker, context, body)
        except LegFailed as failure:
            logger.warning("%s takes no more of the stream: %s", worker.url, failure)
            return await self.go_on(context, continued)

    async def _local(self, context: RequestContext) -> Answer | None:
        """The answer of an append-prefill on the home worker; None: the turn goes remote."""
        assert context.hit is not None
        assert context.features is not None
        home = self._pool.by_identity(context.hit.turn.home)
        assert home is not None, "it was ready when this was decided, and nothing has been awaited"
        terms = LocalTerms(context.features.min_cached_tokens)
        body = with_terms(context.inbound, terms, name_for(context, home))
        # In the same step as the decision, which counted on it: nothing has been awaited since.
        queued = Queued(self._backlog, home.identity, context.features.uncached_at_home)
        context.opened.append(queued)
        try:
            answer = await self._spoken(home, context, body)
        except LegFailed as failure:
            context.close()
            reason = await self._why_not_local(context, failure)
        else:
            queued.close()
            return answer
        context.decision = Decision(Route.REMOTE, reason)
        return None

    async def _why_not_local(self, context: RequestContext, failure: LegFailed) -> Reason:
        """Raises: ``failure`` itself, if another route would meet the same error."""
        if await self._may_retry(context, failure):
            return Reason.HOME_GONE
        if refusal := parse_refusal(failure.error.message):
            self._metrics.refused.labels(refusal.reason).inc()
            logger.warning("local turn refused by %s: %s", failure.worker.url, refusal)
            failure.worker.has_flushed(refusal.flushes)
            return Reason.REFUSED_BY_WORKER
        if failure.error.message.startswith(_UNPATCHED):
            logger.error("%s no longer offers local prefill", failure.worker.url)
            worker = failure.worker
            worker.handshake = replace(worker.handshake, local_prefill=False)
            return Reason.HOME_UNPATCHED
        raise failure

    async def _replica(self, context: RequestContext) -> Answer | None:
        """The answer of a worker that does both; None: it was lost, try another."""
        home, root = self._left.home(context, Role.REPLICA), context.inbound.root
        replica = self._pool.pick(Role.REPLICA, home, context.failed, context.kv_tokens, root)
        try:
            body = context.inbound.with_fields(name_for(context, replica))
            return await self._spoken(replica, context, body)
        except LegFailed as failure:
            context.close()
            if not await self._may_retry(context, failure):
                raise
            return None

    async def _spoken(self, worker: Worker, context: RequestContext, body: bytes) -> Answer:
        spoken, promised = Spoken(self._upstreams.loop), Promised(worker, context)
        told = OneLeg(worker, spoken, promised).told
        context.opened += (promised, self._open(worker, context, body, told))
        return await spoken.future

    async def _without_prefill(self, context: RequestContext, decode: Worker) -> Answer | None:
        """The answer of a decode worker that prefills the whole prompt; None: try on."""
        wanted = context.decision
        context.decision = Decision(Route.LOCAL, Reason.NO_PREFILL)
        queued = Queued(self._backlog, decode.identity, context.judged.remote_tokens)
        context.opened.append(queued)
        try:
            body = with_terms(context.inbound, LocalTerms(0), name_for(context, decode))
            answer = await self._spoken(decode, context, body)
        except LegFailed as failure:
            context.close()
            context.decision = wanted
            if not await self._may_retry(context, failure):
                raise
            return None
        queued.close()
        return answer

    def _open(
        self,
        worker: Worker,
        context: RequestContext,
        body: bytes,
        told: Callable[[Answer | LegFailed], None],
    ) -> Leg:
        worker.breaker.sent()
        path, headers, own = context.inbound.endpoint, context.headers, context.clients_key
        return Leg(self._upstreams, worker, path, body, headers, own, told)

    async def _remote(self, context: RequestContext) -> Answer | None:
        """The decode worker's answer after a transfer; None: a worker was lost, try others.

        Both legs start at once. The decode stream is not held back by the prefill
        worker's answer, which is only checked; but a failed prefill would leave the decode
        leg waiting for KV that never comes, so then the decode leg is given up.
        """
        hit = context.hit
        seen_by = self._pool.by_identity(hit.turn.prefill_worker) if hit else None
        root = context.inbound.root
        prefill = self._pool.pick(Role.PREFILL, seen_by, context.failed, root=root)
        home = self._left.home(context, Role.DECODE)
        avoided = context.failed
        if context.decision.reason is Reason.HOME_FULL and home is not None:
            avoided = [*avoided, home]
        decode = self._pool.pick(Role.DECODE, home, avoided, context.kv_tokens, root)
        name = name_for(context, prefill, decode)
        body = with_room(context.inbound, prefill, self._new_room, name)
        spoken = Spoken(self._upstreams.loop)
        # In the same step as the decision: turns that are decided next shall see it.
        queued = Queued(self._backlog, prefill.identity, context.judged.remote_tokens)
        promised = Promised(decode, context)
        legs = BothLegs(prefill, decode, spoken, queued, promised, self._prefill_failed)
        prefill_leg = self._open(prefill, context, body, legs.prefill_told)
        prefill_leg.set_sink(None)
        decode_leg = self._open(decode, context, body, legs.decode_told)
        context.opened += (queued, promised, prefill_leg, decode_leg)
        try:
            answer = await spoken.future
        except LegFailed as failure:
            context.close()
            if not await self._may_retry(context, failure, prefill, decode):
                raise
            return None
        context.prefill = prefill
        return answer

    def _prefill_failed(self, failure: LegFailed) -> None:
        if failure.error.status >= 500:
            self._metrics.prefill_errors.inc()
            logger.warning("prefill leg failed on %s: %s", failure.worker.url, failure)

    async def _may_retry(
        self, context: RequestContext, failure: LegFailed, *involved: Worker
    ) -> bool:
        """Whether the request may be sent once more, to whichever workers are left.

        As often as there are workers if nothing was sent. Once if it was: it may have been what
        killed the worker. Where the worker lives and has failed, only to another one.

        Args:
            involved: the workers of both legs; a failed transfer may be either's doing.
        """
        pool, worker = self._pool, failure.worker
        if failure.cause is Cause.UNCONNECTED:
            pool.mark_dead(worker, failure.error.message)
            return True
        if context.retried or failure.outcome != "worker_error":
            return False
        match failure.cause:
            case Cause.LOST:
                context.failed.append(worker)
                await pool.check(worker)
                context.retried = True
            case Cause.TRANSFER:
                await asyncio.gather(*(pool.check(one) for one in involved or (worker,)))
                context.retried = True
            case Cause.ANSWERED | Cause.SILENT:
                context.failed.append(worker)
                context.retried = self._left.beside(context, worker)
            case _:
                assert_never(failure.cause)
        return context.retried


def _terms(context: RequestContext) -> LocalTerms:
    """For what a stream's own worker prefills beside it or behind it."""
    return LocalTerms(0 if context.features is None else context.features.min_cached_tokens)
