"""Sending a request to its workers, on the decided route or on what is left of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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

    async def answer(self, course: Course, legs: ExitStack) -> Answer:
        """The decode worker's answer, on whichever route gives one.

        Args:
            legs: closes what was opened for it.
        """
        answer: Answer | None = None
        if course.decision.route is Route.LOCAL:
            answer = await self._local(course, legs)
        while answer is None:
            if course.decision.route is Route.REPLICA:
                answer = await self._replica(course, legs)
            else:
                answer = await self._remote(course, legs)
        course.first_byte_s = self._clock()
        return answer

    async def _local(self, course: Course, legs: ExitStack) -> Answer | None:
        """The answer of an append-prefill on the home worker; None: the turn goes remote."""
        assert course.hit is not None
        assert course.features is not None
        home = self._pool.by_identity(course.hit.turn.home)
        assert home is not None, "it was ready when this was decided, and nothing has been awaited"
        body = _with_terms(course.inbound, LocalTerms(course.features.least_cached_tokens))
        # In the same step as the decision, which counted on it: nothing has been awaited since.
        with self._queued(home, course.features.uncached_at_home):
            try:
                return await self._open(home, course, body, legs).spoken
            except LegFailed as failure:
                reason = await self._why_not_local(course, failure)
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

    async def _replica(self, course: Course, legs: ExitStack) -> Answer | None:
        """The answer of a worker that does both; None: it was lost, try another."""
        hit = course.hit
        home = self._pool.by_identity(hit.turn.home) if hit else None
        replica = self._pool.pick(Role.REPLICA, home)
        try:
            return await self._open(replica, course, course.inbound.with_fields({}), legs).spoken
        except LegFailed as failure:
            if not await self._may_retry(course, failure):
                raise
            return None

    def _open(self, worker: Worker, course: Course, body: bytes, legs: ExitStack) -> Leg:
        leg = Leg(self._upstreams, worker, course.inbound.endpoint, body, course.headers)
        legs.callback(leg.close)
        return leg

    @contextmanager
    def _queued(self, worker: Worker, tokens: int) -> Iterator[None]:
        """Tokens in a worker's queue until it has spoken, or never will."""
        identity = worker.identity
        self._backlog.add(identity, tokens)
        try:
            yield
        finally:
            self._backlog.remove(identity, tokens)

    async def _remote(self, course: Course, legs: ExitStack) -> Answer | None:
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
        with ExitStack() as attempt:
            # In the same step as the decision: turns that are decided next shall see it.
            queued = attempt.enter_context(ExitStack())
            queued.enter_context(self._queued(prefill, course.judged.remote_tokens))
            prefill_leg = self._open(prefill, course, body, attempt)
            prefill_leg.pour_into(None)
            prefill_leg.spoken.add_done_callback(lambda spoken: self._prefilled(spoken, queued))
            decode_leg = self._open(decode, course, body, attempt)
            spoken = (prefill_leg.spoken, decode_leg.spoken)
            try:
                await asyncio.wait(spoken, return_when=asyncio.FIRST_COMPLETED)
                if not decode_leg.spoken.done():
                    await prefill_leg.spoken  # raises if the prefill failed
                answer = await decode_leg.spoken
            except LegFailed as failure:
                if not await self._may_retry(course, failure):
                    raise
                return None
            course.prefill = prefill
            legs.enter_context(attempt.pop_all())
            return answer

    def _prefilled(self, spoken: asyncio.Future[Answer], queued: ExitStack) -> None:
        """The prefill worker has done its part, or never will."""
        queued.close()
        failure = None if spoken.cancelled() else spoken.exception()
        if isinstance(failure, LegFailed) and failure.error.status >= 500:
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
