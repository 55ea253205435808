"""The answer cache in front of the request handler.

A chat request with a question that was answered before gets the stored answer; others are served.
No failure of the cache fails a request: an unreachable, late or malformed pool is a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from ppd.errors import RequestError, WorkerError

from ..config.answer_cache import AnswerCacheConfig
from ..intake.inbound import Endpoint
from ..intake.requests import json_bytes, json_object
from ..serving.handler import RequestHandler
from ..serving.internal import InternalRequest, ServerRequest
from .answers import Answer, RecordingWriter, respond
from .metrics import AnswerCacheMetrics
from .question import FIELD, Question, asking_usage, read
from .store import AnswerStore, StoredAnswer

logger = logging.getLogger("ppd.router.answer_cache")

_FIELD = f'"{FIELD}"'.encode()
Serve = Callable[[ServerRequest], Awaitable[None]]


class AnswerCache:
    """Answers chat requests from the cache, and stores the answers to the others.

    Args:
        config: of the cache.
        store: where answers are stored.
        handler: the request handler, for the keys, limits and counts of requests.
        registry: of the router's metrics.
        wall_clock: seconds since 1970, because answers outlive the router.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        config: AnswerCacheConfig,
        store: AnswerStore,
        handler: RequestHandler,
        registry: CollectorRegistry,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._store = store
        self._handler = handler
        self._wall_clock = wall_clock
        self._clock = clock
        self._store_tasks: set[asyncio.Task[None]] = set()
        self._metrics = AnswerCacheMetrics(registry)

    async def run_forever(self) -> None:
        """Delete expired answers at an interval."""
        while True:
            await asyncio.sleep(self._config.sweep_s)
            try:
                await self._store.delete_expired(self._wall_clock())
            except WorkerError as error:
                logger.warning("%s", error)

    async def serve(self, request: ServerRequest, serve: Serve) -> None:
        """Answer a chat completion from the cache, or serve it and store its answer.

        Args:
            request: the client's request.
            serve: serves a request that the cache does not answer.

        Raises:
            RequestError: its ``answer_cache`` object is malformed, its key is unknown, or the
                tenant has reached its rate limit.
        """
        if not self._config.always and _FIELD not in request.body:
            await serve(request)
            return
        try:
            given = json_object(request.body)
        except RequestError:
            await serve(request)  # the request handler refuses the request
            return
        tenant = self._handler.keys.tenant(request.headers)
        question, fields = read(given, tenant, self._config)
        hides_usage = question is not None and question.streams and not question.wants_usage
        if hides_usage:  # a kept answer has its usage
            fields = asking_usage(fields)
        body = json_bytes(fields) if FIELD in given or hides_usage else request.body
        stored = None
        if question is not None:
            with self._handler.not_served_yet(request):
                stored = await self._look_up(question)
        if question is not None and stored is not None:
            self._handler.charge_request(request)
            now_s = self._wall_clock()
            respond(request, question, stored.answer, stored.score, stored.age_s, now_s)
            return

        def record(answer: Answer) -> None:
            if question is not None and len(answer.text) <= self._config.max_characters:
                task = asyncio.get_running_loop().create_task(self._put(question, answer))
                self._store_tasks.add(task)
                task.add_done_callback(self._store_tasks.discard)

        writer = RecordingWriter(request, record, hides_usage=hides_usage)
        await serve(
            InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
        )

    async def _look_up(self, question: Question) -> StoredAnswer | None:
        started_s = self._clock()
        try:
            stored = await self._store.find(question, self._wall_clock(), self._config.timeout_ms)
        except WorkerError as error:
            self._metrics.lookups.labels("failed").inc()
            logger.warning("%s", error)
            return None
        finally:
            self._metrics.seconds.observe(self._clock() - started_s)
        self._metrics.lookups.labels("miss" if stored is None else "hit").inc()
        return stored

    async def _put(self, question: Question, answer: Answer) -> None:
        try:
            await self._store.put(question, answer, self._wall_clock())
        except WorkerError as error:
            logger.warning("%s", error)
        else:
            self._metrics.stored.inc()
