"""Retrieval in front of the request handler, and its prefill stage.

In the prefill stage a turn's text is searched for before the turn is served, while the request
waits for admission. The deadline of the search is the turn's TTFT budget without its prefill. The
decode stage is in ``probes.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ppd.errors import RequestError, WorkerError
from ppd.marks import Marks

from ..config.retrieval import Failure, RetrievalConfig, RetrievalOptions, Stage
from ..intake.inbound import Endpoint
from ..intake.keys import KeyRing
from ..intake.requests import json_object
from ..serving.handler import RequestHandler
from ..serving.hooks import LatencyEstimate, StreamObserver
from ..serving.internal import InternalRequest, ServerRequest
from ..serving.resume import Insertion
from .answers import AnnotatingWriter, RetrievalReport, Status
from .memory import Citation, Injection, Memory, digest_of, ids_in
from .metrics import RetrievalMetrics
from .passages import message_text
from .probes import Probes
from .requests import FIELD, RetrievalRequest, read
from .retriever import Passage, Retriever, Search, SearchResult, limit_beside

logger = logging.getLogger("ppd.router.retrieval")

_FIELD = f'"{FIELD}"'.encode()


class RetrievalStage:
    """Serves chat completions with retrieval.

    Args:
        handler: serves the completed requests.
        config: of retrieval.
        retriever: searches.
        memory: passages of earlier turns.
        marks: returns the special tokens of the model that is served.
        metrics: of retrieval.
        private: collections that no client may search.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        handler: RequestHandler,
        config: RetrievalConfig,
        retriever: Retriever,
        memory: Memory,
        marks: Callable[[], Marks],
        metrics: RetrievalMetrics,
        private: frozenset[str],
        clock: Callable[[], float],
    ) -> None:
        self._handler = handler
        self._config = config
        self._retriever = retriever
        self._memory = memory
        self._marks = marks
        self._metrics = metrics
        self._private = private
        self._clock = clock
        # Without defaults, a body must name the field for anything to be searched for.
        self._has_defaults = bool(config.defaults) or any(
            limits.default for limits in config.tenants.values()
        )

    async def serve(self, request: ServerRequest) -> None:
        """Serve a chat completion.

        Raises:
            RequestError: its retrieval object is malformed, or not allowed to the tenant.
        """
        if (
            not self._has_defaults
            and not self._memory.size_bytes
            and _FIELD not in request.body  # spares the parsing of the body
        ):
            await self._handler.serve(request)
            return
        retrieval = self._read(self._handler.keys, request)
        if retrieval is None:
            await self._handler.serve(request)
            return
        report = RetrievalReport(Status.OFF, earlier=retrieval.earlier)
        hook = _RetrievalHook(self, retrieval, report)
        self._metrics.passages.labels("put_back").inc(len(retrieval.earlier))
        is_single = retrieval.fields.get("n") in (None, 1)
        if is_single and (retrieval.searches or retrieval.probes):
            inner = _inner(request, retrieval.with_passages(""), report)
            await self._handler.serve(inner, hook)
        else:  # one search for all samples of a request
            with self._handler.not_served_yet(request):
                body = await hook.complete_body(LatencyEstimate(0.0, None))
            await self._handler.serve(_inner(request, body, report))

    def _read(self, keys: KeyRing, request: ServerRequest) -> RetrievalRequest | None:
        try:
            given = json_object(request.body)
        except RequestError:
            return None  # the request handler refuses the request
        tenant = keys.tenant(request.headers)
        return read(given, tenant, self._config, self._memory, self._private)

    async def inject(
        self, retrieval: RetrievalRequest, estimate: LatencyEstimate, report: RetrievalReport
    ) -> Injection:
        """Search for the passages of the new turn.

        The injection is stored before the turn is served, because it is part of the prefix of the
        next turn.

        Args:
            retrieval: the request.
            estimate: the turn's expected latency, which bounds the search.
            report: gets the status and the passages.

        Raises:
            RequestError: the search failed, and the options make that an error of the request.
        """
        options = retrieval.options
        if options is None:
            return Injection.NOTHING
        if not retrieval.searches:
            if retrieval.previous is None:
                return Injection.NOTHING
            if Stage.PREFILL in options.stages:
                report.status, report.new = Status.REUSED, retrieval.previous.of_prompt
            return retrieval.previous
        known = ids_in(options.collection, retrieval.earlier)
        search = Search(
            collection=options.collection,
            text=options.query.replace("{question}", retrieval.question),
            limit=limit_beside(known, options.k),
            filter=options.filter,
            stage=Stage.PREFILL,
            timeout_ms=self._timeout_ms(estimate),
        )
        started_s = self._clock()
        try:
            result = await self._retriever.search(search)
        except WorkerError as error:
            self._record_search(report, started_s, Status.FAILED)
            logger.warning("%s", error)
            if options.on_failure is Failure.FAIL:
                raise RequestError(str(error), status=503, code="retrieval_failed") from error
            report.error = str(error)
            return Injection.NOTHING  # not stored: a retry of the turn searches again
        self._record_search(report, started_s, Status.DEGRADED if result.degraded else Status.OK)
        chosen = _chosen(result, options, known)
        citations = tuple(
            Citation(passage.id, options.collection, passage.score, retrieval.number, Stage.PREFILL)
            for passage in chosen
        )
        report.new = citations
        self._metrics.passages.labels("found").inc(len(chosen))
        text = message_text(chosen, self._marks()) if chosen else ""
        injection = Injection(options, text, citations)
        self._memory.put(retrieval.turn, injection)
        return injection

    def _timeout_ms(self, estimate: LatencyEstimate) -> float:
        config = self._config
        budget_ms = estimate.ttft_target_ms or config.ttft_budget_ms
        return min(config.max_ms, max(config.min_ms, budget_ms - estimate.prefill_ms))

    def _record_search(self, report: RetrievalReport, started_s: float, status: Status) -> None:
        took_s = self._clock() - started_s
        report.status, report.took_ms = status, 1e3 * took_s
        self._metrics.searches.labels(Stage.PREFILL, status).inc()
        self._metrics.seconds.labels(Stage.PREFILL).observe(took_s)

    def probes(self, retrieval: RetrievalRequest, report: RetrievalReport) -> Probes:
        """The decode stage of a request.

        Args:
            retrieval: the request, with options.
            report: gets the passages that the model reads.
        """
        assert retrieval.options is not None

        def remember(insertions: Sequence[Insertion], reply: str) -> None:
            injection = self._memory.get(retrieval.turn) or Injection(retrieval.options, "", ())
            completed = replace(
                injection,
                citations=tuple(report.new),
                insertions=tuple(insertions),
                reply_digest=digest_of(reply),
            )
            self._memory.put(retrieval.turn, completed)

        return Probes(
            options=retrieval.options,
            question=retrieval.question,
            turn=retrieval.number,
            earlier=retrieval.earlier,
            report=report,
            retriever=self._retriever,
            marks=self._marks(),
            metrics=self._metrics,
            remember=remember,
            max_ms=self._config.decode_max_ms,
            room_s=self._config.room_timeout_s,
            clock=self._clock,
        )


@dataclass(frozen=True, slots=True)
class _RetrievalHook:
    """The retrieval of one request; a ``serving.hooks.RequestHook``."""

    stage: RetrievalStage
    retrieval: RetrievalRequest
    report: RetrievalReport

    async def complete_body(self, estimate: LatencyEstimate) -> bytes:
        injection = await self.stage.inject(self.retrieval, estimate, self.report)
        return self.retrieval.with_passages(injection.text)

    def observer(self) -> StreamObserver | None:
        return self.stage.probes(self.retrieval, self.report) if self.retrieval.probes else None


def _chosen(
    result: SearchResult, options: RetrievalOptions, known: Collection[str]
) -> list[Passage]:
    """The best passages that are good enough and not in the conversation yet."""
    good = [
        passage
        for passage in result.passages
        if passage.id not in known
        and (options.threshold is None or passage.score >= options.threshold)
    ]
    return good[: options.k]


def _inner(request: ServerRequest, body: bytes, report: RetrievalReport) -> InternalRequest:
    writer = AnnotatingWriter(request, report)
    return InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
