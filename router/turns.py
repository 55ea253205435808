"""Serving one request: look up its conversation, decide, send the legs, pass on the answer.

This is the life of a request (docs/ARCHITECTURE.md); what a request may look like is
``requests.py``'s, how a leg is sent ``legs.py``'s, which route is taken ``ppd.decision``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from ppd.contract import LocalTerms, parse_refusal
from ppd.decision import (
    Decision,
    Features,
    HomeState,
    Policy,
    Reason,
    Route,
    decide,
    least_cached_tokens,
    predicted_cached_tokens,
)
from ppd.sessions import Hit, SessionIndex, Turn

from .legs import Answer, LegFailed, StreamBroken, open_leg
from .metrics import Metrics
from .requests import FORWARDED_HEADERS, Endpoint, Inbound, parse, tenant_of
from .sse import DONE, Tail, Usage, usage_of_generate, usage_of_openai
from .workers import Role, Worker, WorkerPool

logger = logging.getLogger("ppd.router.turns")

# How SGLang 0.5.21 refuses what is neither remote nor, for want of the plugin, local.
_UNPATCHED = "without bootstrap room"


@dataclass(slots=True)
class Course:
    """What has been settled about a request, and by whom it is served."""

    inbound: Inbound
    headers: dict[str, str]
    arrived_s: float
    hit: Hit | None
    features: Features | None
    decision: Decision
    prefill: Worker | None = None
    first_byte_s: float | None = None

    @property
    def turn(self) -> int:
        if self.hit is None:
            return 1
        # The same input again is the same turn, generated anew.
        return self.hit.turn.number + (self.hit.bytes_after > 0)


class TurnServer:
    """Serves requests of all endpoints.

    Args:
        clock: seconds, monotonic.
        new_room: a random bootstrap room below 2**63.
        new_session: a fresh name for a conversation.
    """

    def __init__(
        self,
        *,
        client: aiohttp.ClientSession,
        pool: WorkerPool,
        index: SessionIndex,
        policy: Policy,
        metrics: Metrics,
        clock: Callable[[], float],
        new_room: Callable[[], int],
        new_session: Callable[[], str],
    ) -> None:
        self._client = client
        self._pool = pool
        self._index = index
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._new_room = new_room
        self._new_session = new_session

    async def serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Raises:
        RequestError: the request is wrong.
        WorkerError: no worker is left to serve it.
        LegFailed: a worker failed or refused before the first byte.
        """
        arrived_s = self._clock()
        tenant = tenant_of(request.headers.get("Authorization"))
        inbound = parse(endpoint, await request.read(), tenant, self._pool.models)
        course = self._decide(inbound, request, arrived_s)
        try:
            async with self._answer(course) as answer:
                self._count(course)
                if inbound.stream:
                    return await self._relay_stream(request, course, answer)
                return self._relay_body(course, answer)
        except asyncio.CancelledError:  # aiohttp cancels the handler when the client hangs up
            self._finish(course, "disconnected")
            raise

    # -- decide -------------------------------------------------------------------------

    def _decide(self, inbound: Inbound, request: web.Request, arrived_s: float) -> Course:
        headers = {h: request.headers[h] for h in FORWARDED_HEADERS if h in request.headers}
        hit, features = None, None
        if inbound.chain is None:
            decision = Decision(Route.REMOTE, Reason.BATCH)
        else:
            hit = self._index.find(inbound.chain, arrived_s)
            if hit is not None:
                features = self._features(hit, inbound.chain.total_bytes)
            decision = decide(features, self._policy)
        return Course(inbound, headers, arrived_s, hit, features, decision)

    def _features(self, hit: Hit, total_bytes: int) -> Features:
        home = self._pool.by_identity(hit.turn.home)
        if home is None:
            state, page_size = HomeState.GONE, 1
        else:
            page_size = home.handshake.page_size
            state = HomeState.READY if home.handshake.local_prefill else HomeState.UNPATCHED
        # The conversation's own tokens per byte; what follows its prefix is the reply, then the
        # new turn.
        known_bytes = max(1, total_bytes - hit.bytes_after)
        tokens_after = round(hit.bytes_after * hit.turn.prompt_tokens / known_bytes)
        return Features(
            turn=hit.turn.number + 1,
            context_tokens=hit.turn.kv_tokens,
            new_tokens=max(1, tokens_after - hit.turn.completion_tokens),
            prefill_tokens=hit.turn.prefill_tokens,
            page_size=page_size,
            home=state,
        )

    # -- legs ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _answer(self, course: Course) -> AsyncIterator[Answer]:
        """The decode worker's answer, on whichever route gives one."""
        async with AsyncExitStack() as legs:
            answer: Answer | None = None
            if course.decision.route is Route.LOCAL:
                answer = await self._local(course, legs)
            while answer is None:
                answer = await self._remote(course, legs)
            course.first_byte_s = self._clock()
            yield answer

    async def _local(self, course: Course, legs: AsyncExitStack) -> Answer | None:
        """The answer of an append-prefill on the home worker; None: the turn goes remote."""
        assert course.hit is not None
        turn = course.hit.turn
        home = self._pool.by_identity(turn.home)
        if home is None:
            course.decision = Decision(Route.REMOTE, Reason.HOME_GONE)
            return None
        terms = LocalTerms(least_cached_tokens(turn.prompt_tokens, home.handshake.page_size))
        body = _with_terms(course.inbound, terms)
        try:
            return await legs.enter_async_context(
                open_leg(self._client, home, course.inbound.endpoint, body, course.headers)
            )
        except LegFailed as failure:
            course.decision = Decision(Route.REMOTE, self._why_not_local(failure))
            return None

    def _why_not_local(self, failure: LegFailed) -> Reason:
        """Raises: ``failure`` itself, if another route would meet the same error."""
        if failure.unreachable:
            self._pool.mark_dead(failure.worker, failure.error.message)
            return Reason.HOME_GONE
        if refusal := parse_refusal(failure.error.message):
            self._metrics.refused.labels(refusal.reason).inc()
            logger.warning("local turn refused by %s: %s", failure.worker.url, refusal)
            return Reason.REFUSED_BY_WORKER
        if _UNPATCHED in failure.error.message:
            logger.error("%s no longer offers local prefill", failure.worker.url)
            worker = failure.worker
            worker.handshake = replace(worker.handshake, local_prefill=False)
            return Reason.HOME_UNPATCHED
        raise failure

    async def _remote(self, course: Course, legs: AsyncExitStack) -> Answer | None:
        """The decode worker's answer after a transfer; None: a worker was lost, try others.

        Both legs start at once. The decode stream is not held back by the prefill
        worker's answer, which is only checked; but a failed prefill would leave the decode
        leg waiting for KV that never comes, so then the decode leg is given up.
        """
        hit = course.hit
        prefill = self._pool.pick(
            Role.PREFILL, self._pool.by_identity(hit.turn.prefill_worker) if hit else None
        )
        decode = self._pool.pick(
            Role.DECODE, self._pool.by_identity(hit.turn.home) if hit else None
        )
        body = _with_room(course.inbound, prefill, self._new_room)
        async with AsyncExitStack() as attempt:
            prefill_leg = asyncio.create_task(self._prefill(prefill, course, body))
            attempt.push_async_callback(_cancel, prefill_leg)
            decode_leg = asyncio.create_task(
                attempt.enter_async_context(
                    open_leg(self._client, decode, course.inbound.endpoint, body, course.headers)
                )
            )
            attempt.push_async_callback(_cancel, decode_leg)
            try:
                await asyncio.wait({prefill_leg, decode_leg}, return_when=asyncio.FIRST_COMPLETED)
                if not decode_leg.done():
                    await prefill_leg  # raises if the prefill failed
                answer = await decode_leg
            except LegFailed as failure:
                if not failure.unreachable:
                    raise
                self._pool.mark_dead(failure.worker, failure.error.message)
                return None
            course.prefill = prefill
            legs.push_async_exit(attempt.pop_all())
            return answer

    async def _prefill(self, worker: Worker, course: Course, body: dict[str, Any]) -> None:
        body = {k: v for k, v in body.items() if k != "stream_options"} | {"stream": False}
        try:
            async with open_leg(
                self._client, worker, course.inbound.endpoint, body, course.headers
            ):
                pass
        except LegFailed as failure:
            self._metrics.prefill_errors.inc()
            logger.warning("prefill leg failed on %s: %s", worker.url, failure)
            raise

    # -- the answer ---------------------------------------------------------------------

    def _relay_body(self, course: Course, answer: Answer) -> web.Response:
        try:
            parsed = orjson.loads(answer.head)
        except orjson.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            native = course.inbound.endpoint is Endpoint.GENERATE
            self._learn(
                course, answer, usage_of_generate(parsed) if native else usage_of_openai(parsed)
            )
        self._finish(course, "ok")
        return web.Response(
            body=answer.head,
            content_type=answer.response.content_type,
            headers=_route_headers(course),
        )

    async def _relay_stream(
        self, request: web.Request, course: Course, answer: Answer
    ) -> web.StreamResponse:
        inbound = course.inbound
        tail = Tail(hide_usage=not inbound.asks_usage, native=inbound.endpoint is Endpoint.GENERATE)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                **_route_headers(course),
            }
        )
        outcome = "ok"
        try:
            await response.prepare(request)
            try:
                async for block in answer.blocks():
                    passed = tail.pass_on(block)
                    if tail.done:
                        # Before the client sees the end, so that its next turn finds this one.
                        self._learn(course, answer, tail.usage)
                    if passed:
                        await response.write(passed)
                trouble = None if tail.done else "the decode worker ended its stream early"
            except StreamBroken as broken:
                trouble = None if tail.done else str(broken)
            if trouble is not None:
                logger.error("truncated stream from %s: %s", answer.worker.url, trouble)
                outcome = "truncated"
                await response.write(_error_event(trouble) + DONE)
            await response.write_eof()
        except ConnectionError:  # the client hung up while we wrote
            outcome = "disconnected"
        self._finish(course, outcome)
        return response

    # -- after --------------------------------------------------------------------------

    def _learn(self, course: Course, answer: Answer, usage: Usage | None) -> None:
        """Remember where the conversation now is, and compare prediction and truth."""
        if usage is None or course.inbound.chain is None:
            return
        before = course.hit.turn if course.hit else None
        if course.prefill is not None:
            prefill_worker: str | None = course.prefill.identity
            prefill_tokens = usage.prompt_tokens
        else:
            assert before is not None, "a local turn continues a known one"
            prefill_worker, prefill_tokens = before.prefill_worker, before.prefill_tokens
        turn = Turn(
            session=before.session if before else self._new_session(),
            number=course.turn,
            home=answer.worker.identity,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_worker=prefill_worker,
            prefill_tokens=prefill_tokens,
        )
        self._index.record(course.inbound.chain, turn, self._clock())
        if course.decision.route is Route.LOCAL:
            self._compare(course, turn, usage)
        logger.info(
            "turn session=%s turn=%d route=%s reason=%s prompt=%d cached=%d completion=%d "
            "ttft_ms=%.1f",
            turn.session,
            turn.number,
            course.decision.route,
            course.decision.reason,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            1e3 * ((course.first_byte_s or self._clock()) - course.arrived_s),
        )

    def _compare(self, course: Course, turn: Turn, usage: Usage) -> None:
        assert course.features is not None
        # The last prompt token is always computed: its logits are the first new token.
        held = min(course.features.context_tokens, usage.prompt_tokens - 1)
        predicted = predicted_cached_tokens(held, course.features.page_size)
        self._metrics.cached_predicted.inc(predicted)
        self._metrics.cached_actual.inc(usage.cached_tokens)
        if usage.cached_tokens < predicted:
            self._metrics.cache_misses.inc()
            logger.warning(
                "cache misprediction session=%s turn=%d: predicted %d cached tokens, the engine "
                "found %d of %d (reply re-tokenized or edited, or KV evicted)",
                turn.session,
                turn.number,
                predicted,
                usage.cached_tokens,
                usage.prompt_tokens,
            )

    def _count(self, course: Course) -> None:
        decision = course.decision
        self._metrics.turns.labels(course.inbound.endpoint, decision.route, decision.reason).inc()
        assert course.first_byte_s is not None
        self._metrics.ttft.labels(decision.route).observe(course.first_byte_s - course.arrived_s)

    def _finish(self, course: Course, outcome: str) -> None:
        self._metrics.finished.labels(course.inbound.endpoint, outcome).inc()


def _with_terms(inbound: Inbound, terms: LocalTerms) -> dict[str, Any]:
    """The body of a local leg. ``/generate`` carries the marker in its sampling parameters."""
    body = inbound.body
    if inbound.endpoint is not Endpoint.GENERATE:
        custom = (body.get("custom_params") or {}) | terms.to_custom_params()
        return {**body, "custom_params": custom}
    sampling = body.get("sampling_params") or {}
    custom = (sampling.get("custom_params") or {}) | terms.to_custom_params()
    return {**body, "sampling_params": {**sampling, "custom_params": custom}}


def _with_room(inbound: Inbound, prefill: Worker, new_room: Callable[[], int]) -> dict[str, Any]:
    """The body of both legs of a remote turn."""
    host, port = prefill.bootstrap_host, prefill.handshake.bootstrap_port
    if inbound.chain is not None:
        address = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": new_room()}
    else:
        n = inbound.prompts
        address = {
            "bootstrap_host": [host] * n,
            "bootstrap_port": [port] * n,
            "bootstrap_room": [new_room() for _ in range(n)],
        }
    return inbound.body | address


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, LegFailed):
        await task


def _route_headers(course: Course) -> dict[str, str]:
    return {
        "X-PPD-Route": course.decision.route,
        "X-PPD-Reason": course.decision.reason,
        "X-PPD-Turn": str(course.turn),
    }


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "worker_error", "param": None, "code": 502}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
