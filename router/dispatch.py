"""Sending a request to its workers, on the decided route or on what is left of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from ppd.backlog import Backlog
from ppd.contract import LocalTerms, Role, parse_refusal
from ppd.decision import Decision, Reason, Route

from .course import Course
from .legs import Answer, Cause, Leg, LegFailed
from .metrics import Metrics
from .requests import Endpoint, Inbound
from .wire.client import Upstreams
from .workers import Worker, WorkerPool

logger = logging.getLogger("ppd.router.turns")

# How SGLang 0.5.21 refuses what is neither remote nor, for want of the plugin, local. Only at
# the start of a message: validation errors repeat what a client has sent.
_UNPATCHED = "Invalid request: Disaggregated request received without bootstrap room"


class Dispatcher:
    """Opens the legs of a request.

    Args:
        clock: seconds, monotonic.
        new_room: a random bootstrap room below 2**63.
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
    ) -> None:
        self._upstreams = upstreams
        self._pool = pool
        self._backlog = backlog
        self._metrics = metrics
        self._clock = clock
        self._new_room = new_room

    async def answer(self, course: Course) -> Answer:
        """The decode worker's answer, on whichever route gives one.

        ``course.opened`` is what must be closed when it is over.
        """
        answer: Answer | None = None
        if course.decision.route is Route.LOCAL:
            answer = await self._local(course)
        while answer is None:
            if course.decision.route is Route.REPLICA:
                answer = await self._replica(course)
            else:
                answer = await self._remote(course)
        course.first_byte_s = self._clock()
        return answer

    async def _local(self, course: Course) -> Answer | None:
        """The answer of an append-prefill on the home worker; None: the turn goes remote."""
        assert course.hit is not None
        assert course.features is not None
        home = self._pool.by_identity(course.hit.turn.home)
        assert home is not None, "it was ready when this was decided, and nothing has been awaited"
        body = _with_terms(course.inbound, LocalTerms(course.features.least_cached_tokens))
        # In the same step as the decision, which counted on it: nothing has been awaited since.
        queued = _Queued(self._backlog, home.identity, course.features.uncached_at_home)
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
            return Reason.REFUSED_BY_WORKER
        if failure.error.message.startswith(_UNPATCHED):
            logger.error("%s no longer offers local prefill", failure.worker.url)
            worker = failure.worker
            worker.handshake = replace(worker.handshake, local_prefill=False)
            return Reason.HOME_UNPATCHED
        raise failure

    async def _replica(self, course: Course) -> Answer | None:
        """The answer of a worker that does both; None: it was lost, try another."""
        hit = course.hit
        home = self._pool.by_identity(hit.turn.home) if hit else None
        replica = self._pool.pick(Role.REPLICA, home)
        try:
            return await self._spoken(replica, course, course.inbound.with_fields({}))
        except LegFailed as failure:
            course.close()
            if not await self._may_retry(course, failure):
                raise
            return None

    async def _spoken(self, worker: Worker, course: Course, body: bytes) -> Answer:
        spoken = _Spoken(self._upstreams.loop)
        course.opened.append(self._open(worker, course, body, spoken.told))
        return await spoken.future

    def _open(
        self,
        worker: Worker,
        course: Course,
        body: bytes,
        told: Callable[[Answer | LegFailed], None],
    ) -> Leg:
        return Leg(self._upstreams, worker, course.inbound.endpoint, body, course.headers, told)

    async def _remote(self, course: Course) -> Answer | None:
        """The decode worker's answer after a transfer; None: a worker was lost, try others.

        Both legs start at once. The decode stream is not held back by the prefill
        worker's answer, which is only checked; but a failed prefill would leave the decode
        leg waiting for KV that never comes, so then the decode leg is given up.
        """
        hit = course.hit
        seen_by = self._pool.by_identity(hit.turn.prefill_worker) if hit else None
        prefill = self._pool.pick(Role.PREFILL, seen_by)
        home = self._pool.by_identity(hit.turn.home) if hit else None
        if course.decision.reason is Reason.HOME_FULL:
            decode = self._pool.pick(Role.DECODE, None, avoid=home)
        else:
            decode = self._pool.pick(Role.DECODE, home)
        body = _with_room(course.inbound, prefill, self._new_room)
        spoken = _Spoken(self._upstreams.loop)
        # In the same step as the decision: turns that are decided next shall see it.
        queued = _Queued(self._backlog, prefill.identity, course.judged.remote_tokens)

        def prefilled(answer: Answer | LegFailed) -> None:
            queued.close()
            if isinstance(answer, LegFailed):
                self._prefill_failed(answer)
                spoken.told(answer)

        prefill_leg = self._open(prefill, course, body, prefilled)
        prefill_leg.pour_into(None)
        decode_leg = self._open(decode, course, body, spoken.told)
        course.opened += (queued, prefill_leg, decode_leg)
        try:
            answer = await spoken.future
        except LegFailed as failure:
            course.close()
            if not await self._may_retry(course, failure):
                raise
            return None
        course.prefill = prefill
        return answer

    def _prefill_failed(self, failure: LegFailed) -> None:
        if failure.error.status >= 500:
            self._metrics.prefill_errors.inc()
            logger.warning("prefill leg failed on %s: %s", failure.worker.url, failure)

    async def _may_retry(self, course: Course, failure: LegFailed) -> bool:
        """Whether the request may be sent once more, to whichever workers are left.

        As often as there are workers if nothing was sent. Once if it was: it may have been
        what killed the worker.
        """
        match failure.cause:
            case Cause.UNCONNECTED:
                self._pool.mark_dead(failure.worker, failure.error.message)
                return True
            case Cause.LOST:
                await self._pool.check(failure.worker)
                retry, course.retried = not course.retried, True
                return retry
            case Cause.ANSWERED | Cause.SILENT:
                return False
            case _:
                assert_never(failure.cause)


class _Queued:
    """Tokens in a worker's queue until it has spoken, or never will."""

    def __init__(self, backlog: Backlog, identity: str, tokens: int) -> None:
        self._backlog = backlog
        self._of = (identity, tokens)
        self._left = False
        backlog.add(identity, tokens)

    def close(self) -> None:
        if not self._left:
            self._left = True
            self._backlog.remove(*self._of)


class _Spoken:
    """The decode worker's answer, or what came in its way first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Answer] = loop.create_future()

    def told(self, answer: Answer | LegFailed) -> None:
        if self.future.done():
            return  # cancelled, with whoever waited for it; or the other leg was first
        if isinstance(answer, LegFailed):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


def _with_terms(inbound: Inbound, terms: LocalTerms) -> bytes:
    """The body of a local leg. ``/generate`` carries the marker in its sampling parameters."""
    if inbound.endpoint is not Endpoint.GENERATE:
        custom = (inbound.fields.get("custom_params") or {}) | terms.to_custom_params()
        return inbound.with_fields({"custom_params": custom})
    sampling = inbound.fields.get("sampling_params") or {}
    custom = (sampling.get("custom_params") or {}) | terms.to_custom_params()
    return inbound.with_fields({"sampling_params": {**sampling, "custom_params": custom}})


def _with_room(inbound: Inbound, prefill: Worker, new_room: Callable[[], int]) -> bytes:
    """The body of both legs of a remote turn."""
    host, port = prefill.bootstrap_host, prefill.handshake.bootstrap_port
    address: dict[str, Any]
    if inbound.chain is not None:
        address = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": new_room()}
    else:
        n = inbound.prompts
        address = {
            "bootstrap_host": [host] * n,
            "bootstrap_port": [port] * n,
            "bootstrap_room": [new_room() for _ in range(n)],
        }
    return inbound.with_fields(address)
