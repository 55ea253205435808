"""A chat request whose question was answered before is answered at once; others are served.

Nothing here may cost an answer: a pool that is down, late or wrong is a look-up that found nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from ppd.errors import RequestError, WorkerError

from ..config.answer_cache import AnswerCacheConfig
from ..intake.inbound import Endpoint
from ..intake.requests import json_bytes, json_object
from ..serving.handler import RequestHandler
from ..serving.internal import InternalRequest, ServerRequest
from .answers import Answer, Listening, respond
from .question import FIELD, Question, read
from .store import AnswerStore, StoredResponse

logger = logging.getLogger("ppd.router.answer_cache")

_FIELD = f'"{FIELD}"'.encode()
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Serve = Callable[[ServerRequest], Awaitable[None]]


class AnswerCache:
    """
    Args:
        serve: serves those that are not answered here.
        wall_clock: seconds since 1970, as answers outlive the router.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        config: AnswerCacheConfig,
        store: AnswerStore,
        turns: RequestHandler,
        registry: CollectorRegistry,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._store = store
        self._turns = turns
        self._wall_clock = wall_clock
        self._clock = clock
        self._keeping: set[asyncio.Task[None]] = set()
        self._looked_up = Counter(
            "ppd_answer_cache",
            "Questions by what the answer cache had: hit, miss, failed",
            ["status"],
            registry=registry,
        )
        self._kept = Counter("ppd_answer_cache_kept", "Answers kept", registry=registry)
        self._seconds = Histogram(
            "ppd_answer_cache_seconds", "Time of a look-up", buckets=_SECONDS, registry=registry
        )

    async def run_forever(self) -> None:
        """Deletes what is past its time."""
        while True:
            await asyncio.sleep(self._config.sweep_s)
            try:
                await self._store.forget_older(self._wall_clock())
            except WorkerError as error:
                logger.warning("%s", error)

    async def serve(self, request: ServerRequest, serve: Serve) -> None:
        """
        Raises:
            RequestError: what it says of the cache is wrong, or it may not ask now.
        """
        if not self._config.always and _FIELD not in request.body:
            await serve(request)
            return
        try:
            given = json_object(request.body)
        except RequestError:
            await serve(request)  # the turn server tells
            return
        tenant = self._turns.keys.tenant(request.headers)
        question, fields = read(given, tenant, self._config)
        body = json_bytes(fields) if FIELD in given else request.body
        kept = None
        if question is not None:
            with self._turns.not_served_yet(request):
                kept = await self._found(question)
        if question is not None and kept is not None:
            self._turns.charge_request(request)
            now_s = self._wall_clock()
            respond(request, question, kept.answer, kept.score, kept.age_s, now_s)
            return

        def heard(answer: Answer) -> None:
            if question is not None and len(answer.text) <= self._config.max_characters:
                task = asyncio.get_running_loop().create_task(self._keep(question, answer))
                self._keeping.add(task)
                task.add_done_callback(self._keeping.discard)

        writer = Listening(request, heard)
        await serve(
            InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
        )

    async def _found(self, question: Question) -> StoredResponse | None:
        began_s = self._clock()
        try:
            kept = await self._store.find(question, self._wall_clock(), self._config.timeout_ms)
        except WorkerError as error:
            self._looked_up.labels("failed").inc()
            logger.warning("%s", error)
            return None
        finally:
            self._seconds.observe(self._clock() - began_s)
        self._looked_up.labels("miss" if kept is None else "hit").inc()
        return kept

    async def _keep(self, question: Question, answer: Answer) -> None:
        try:
            await self._store.keep(question, answer, self._wall_clock())
        except WorkerError as error:
            logger.warning("%s", error)
        else:
            self._kept.inc()
