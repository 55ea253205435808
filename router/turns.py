"""Serving one request: look up its conversation, decide, dispatch, pass on the answer.

This is the life of a request (docs/ARCHITECTURE.md) in one page; the steps are
``requests.py``'s, ``ppd.decision``'s, ``dispatch.py``'s and ``relay.py``'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from ppd.decision import (
    Decision,
    Features,
    HomeState,
    Policy,
    Reason,
    Route,
    decide,
    least_cached_tokens,
)
from ppd.sessions import Hit, SessionIndex

from .course import Course
from .dispatch import Dispatcher
from .ledger import Ledger
from .relay import relay_body, relay_stream
from .requests import Endpoint, Inbound, Served, parse
from .scrub import FORWARDED_HEADERS, tenant_of
from .workers import WorkerPool


class TurnServer:
    """Serves requests of all endpoints.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        index: SessionIndex,
        policy: Policy,
        dispatcher: Dispatcher,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._index = index
        self._policy = policy
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._clock = clock

    async def serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Raises:
        RequestError: the request is wrong.
        WorkerError: no worker is left to serve it.
        LegFailed: a worker failed or refused before the first byte.
        """
        arrived_s = self._clock()
        tenant = tenant_of(request.headers.get("Authorization"))
        served = Served(self._pool.models, self._pool.vocab_size)
        inbound = parse(endpoint, await request.read(), tenant, served)
        course = self._decide(inbound, request, arrived_s)
        try:
            async with self._dispatcher.answer(course) as answer:
                self._ledger.answered(course)
                if inbound.stream:
                    return await relay_stream(request, course, answer, self._ledger)
                return relay_body(course, answer, self._ledger)
        except asyncio.CancelledError:  # aiohttp cancels the handler when the client hangs up
            self._ledger.finished(course, "disconnected")
            raise

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
            least_cached_tokens=least_cached_tokens(hit.turn.prompt_tokens, page_size),
            new_tokens=max(1, tokens_after - hit.turn.completion_tokens),
            prefill_tokens=hit.turn.prefill_tokens,
            page_size=page_size,
            home=state,
        )
