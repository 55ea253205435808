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
from ..seeing.metrics import Metrics
from ..wire.client import Upstreams
from ..workers.cluster import WorkerPool
from ..workers.worker import Worker
from .bodies import name_for, with_room, with_terms
from .course import Course
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
        pool: WorkerPool,
        backlog: Backlog,
        metrics: Metrics,
        clock: Callable[[], float],
        new_room: Callable[[], int],
        escapes: bool,
    ) -> None:
        self._upstreams = upstreams
        self._pool = pool
        self._backlog = backlog
        self._metrics = metrics
        self._clock = clock
        self._new_room = new_room
        self._left = Left(pool, escapes)

    async def answer(self, course: Course) -> Answer:
        """The decode worker's answer, on whichever route gives one.

        ``course.opened`` is what must be closed when it is over.
        """
        answer: Answer | None = None
        if course.decision.route is Route.LOCAL:
            answer = await self._local(course)
        while answer is None:
            if self._left.on_replica(course):
                answer = await self._replica(course)
            elif (decode := self._left.way_out(course)) is not None:
                answer = await self._without_prefill(course, decode)
            else:
                answer = await self._remote(course)
        if course.first_byte_s is None:
            course.first_byte_s = self._clock()
        return answer

    async def go_on(self, course: Course, continued: Inbound) -> Answer:
        """The rest of a stream whose worker was lost, from another one.

        Raises:
            LegFailed, WorkerError: none has it.
        """
        course.close()
        begun = course.decision.route
        course.decision = Decision(
            Route.REPLICA if begun is Route.REPLICA else Route.REMOTE, Reason.RESUMED
        )
        course.inbound, course.prefill, course.retried = continued, None, False
        return await self.answer(course)

    async def prime(self, course: Course, primer: Inbound, worker: Worker) -> None:
        """Have a stream's worker prefill what the stream shall go on behind.

        Raises:
            LegFailed: it did not.
        """
        if not worker.handshake.local_prefill:
            return
        spoken = Spoken(self._upstreams.loop)
        body = with_terms(primer, _terms(course), name_for(course, worker))
        leg = self._open(worker, course, body, OneLeg(worker, spoken).told)
        course.opened.append(leg)
        try:
            await spoken.future
        finally:
            leg.close()

    async def append(self, course: Course, continued: Inbound, worker: Worker) -> Answer:
        """The rest of a stream behind something new, from the worker that has the stream so far;
        if it will not, from another one.

        Raises:
            LegFailed, WorkerError: none has it.
        """
        course.close()
        if not worker.handshake.local_prefill:
            return await self.go_on(course, continued)
        course.inbound = continued
        course.decision = Decision(Route.LOCAL, Reason.APPENDED)
        try:
            body = with_terms(continued, _terms(course), name_for(course, worker))
            return await self._spoken(worker, course, body)
        except LegFailed as failure:
            logger.warning("%s takes no more of the stream: %s", worker.url, failure)
            return await self.go_on(course, continued)

    async def _local(self, course: Course) -> Answer | None:
        """The answer of an append-prefill on the home worker; None: the turn goes remote."""
        assert course.hit is not None
        assert course.features is not None
        home = self._pool.by_identity(course.hit.turn.home)
        assert home is not None, "it was ready when this was decided, and nothing has been awaited"
        terms = LocalTerms(course.features.least_cached_tokens)
        body = with_terms(course.inbound, terms, name_for(course, home))
        # In the same step as the decision, which counted on it: nothing has been awaited since.
        queued = Queued(self._backlog, home.identity, course.features.uncached_at_home)
        course.opened.append(queued)
        try:
            answer = await self._spoken(home, course, body)
        except LegFailed as failure:
            course.close()
            reason = await self._why_not_local(course, failure)
        else:
            queued.close()
            return answer
        course.decision = Decision(Route.REMOTE, reason)
        return None

    async def _why_not_local(self, course: Course, failure: LegFailed) -> Reason:
        """Raises: ``failure`` itself, if another route would meet the same error."""
        if await self._may_retry(course, failure):
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

    async def _replica(self, course: Course) -> Answer | None:
        """The answer of a worker that does both; None: it was lost, try another."""
        home, root = self._left.home(course, Role.REPLICA), course.inbound.root
        replica = self._pool.pick(Role.REPLICA, home, course.failed, course.kv_tokens, root)
        try:
            body = course.inbound.with_fields(name_for(course, replica))
            return await self._spoken(replica, course, body)
        except LegFailed as failure:
            course.close()
            if not await self._may_retry(course, failure):
                raise
            return None

    async def _spoken(self, worker: Worker, course: Course, body: bytes) -> Answer:
        spoken, promised = Spoken(self._upstreams.loop), Promised(worker, course)
        told = OneLeg(worker, spoken, promised).told
        course.opened += (promised, self._open(worker, course, body, told))
        return await spoken.future

    async def _without_prefill(self, course: Course, decode: Worker) -> Answer | None:
        """The answer of a decode worker that prefills the whole prompt; None: try on."""
        wanted = course.decision
        course.decision = Decision(Route.LOCAL, Reason.NO_PREFILL)
        queued = Queued(self._backlog, decode.identity, course.judged.remote_tokens)
        course.opened.append(queued)
        try:
            body = with_terms(course.inbound, LocalTerms(0), name_for(course, decode))
            answer = await self._spoken(decode, course, body)
        except LegFailed as failure:
            course.close()
            course.decision = wanted
            if not await self._may_retry(course, failure):
                raise
            return None
        queued.close()
        return answer

    def _open(
        self,
        worker: Worker,
        course: Course,
        body: bytes,
        told: Callable[[Answer | LegFailed], None],
    ) -> Leg:
        worker.breaker.sent()
        path, headers, own = course.inbound.endpoint, course.headers, course.clients_key
        return Leg(self._upstreams, worker, path, body, headers, own, told)

    async def _remote(self, course: Course) -> Answer | None:
        """The decode worker's answer after a transfer; None: a worker was lost, try others.

        Both legs start at once. The decode stream is not held back by the prefill
        worker's answer, which is only checked; but a failed prefill would leave the decode
        leg waiting for KV that never comes, so then the decode leg is given up.
        """
        hit = course.hit
        seen_by = self._pool.by_identity(hit.turn.prefill_worker) if hit else None
        root = course.inbound.root
        prefill = self._pool.pick(Role.PREFILL, seen_by, course.failed, root=root)
        home = self._left.home(course, Role.DECODE)
        avoided = course.failed
        if course.decision.reason is Reason.HOME_FULL and home is not None:
            avoided = [*avoided, home]
        decode = self._pool.pick(Role.DECODE, home, avoided, course.kv_tokens, root)
        name = name_for(course, prefill, decode)
        body = with_room(course.inbound, prefill, self._new_room, name)
        spoken = Spoken(self._upstreams.loop)
        # In the same step as the decision: turns that are decided next shall see it.
        queued = Queued(self._backlog, prefill.identity, course.judged.remote_tokens)
        promised = Promised(decode, course)
        legs = BothLegs(prefill, decode, spoken, queued, promised, self._prefill_failed)
        prefill_leg = self._open(prefill, course, body, legs.prefill_told)
        prefill_leg.pour_into(None)
        decode_leg = self._open(decode, course, body, legs.decode_told)
        course.opened += (queued, promised, prefill_leg, decode_leg)
        try:
            answer = await spoken.future
        except LegFailed as failure:
            course.close()
            if not await self._may_retry(course, failure, prefill, decode):
                raise
            return None
        course.prefill = prefill
        return answer

    def _prefill_failed(self, failure: LegFailed) -> None:
        if failure.error.status >= 500:
            self._metrics.prefill_errors.inc()
            logger.warning("prefill leg failed on %s: %s", failure.worker.url, failure)

    async def _may_retry(self, course: Course, failure: LegFailed, *involved: Worker) -> bool:
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
        if course.retried or failure.outcome != "worker_error":
            return False
        match failure.cause:
            case Cause.LOST:
                course.failed.append(worker)
                await pool.check(worker)
                course.retried = True
            case Cause.TRANSFER:
                await asyncio.gather(*(pool.check(one) for one in involved or (worker,)))
                course.retried = True
            case Cause.ANSWERED | Cause.SILENT:
                course.failed.append(worker)
                course.retried = self._left.beside(course, worker)
            case _:
                assert_never(failure.cause)
        return course.retried


def _terms(course: Course) -> LocalTerms:
    """For what a stream's own worker prefills beside it or behind it."""
    return LocalTerms(0 if course.features is None else course.features.least_cached_tokens)
