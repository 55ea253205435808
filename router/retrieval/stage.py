"""The prefill stage: what a turn asks for is searched for before the turn is served.

The search runs while the request waits to be let in. Its deadline is what the turn's TTFT budget
leaves beside its prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ppd.errors import RequestError, WorkerError
from ppd.marks import Marks

from ..config.retrieval import Failure, RetrievalConfig, Stage, Wish
from ..intake.inbound import Endpoint
from ..intake.keys import KeyRing
from ..intake.requests import json_object
from ..serving.handler import RequestHandler
from ..serving.hooks import LatencyEstimate, StreamObserver
from ..serving.internal import InternalRequest, ServerRequest
from ..serving.resume import Insertion
from .answers import AnnotatingWriter, Note, Status
from .memory import Citation, Injection, Memory, digest_of
from .metrics import RetrievalMetrics
from .passages import block
from .probes import Probes
from .requests import FIELD, RetrievalRequest, read
from .retriever import Found, Passage, Retriever, Search

logger = logging.getLogger("ppd.router.retrieval")

_FIELD = f'"{FIELD}"'.encode()


class RetrievalStage:
    """
    Args:
        marks: of the model that is served.
        private: collections that are nobody's to search.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        turns: RequestHandler,
        config: RetrievalConfig,
        retriever: Retriever,
        memory: Memory,
        marks: Callable[[], Marks],
        metrics: RetrievalMetrics,
        private: frozenset[str],
        clock: Callable[[], float],
    ) -> None:
        self._turns = turns
        self._config = config
        self._retriever = retriever
        self._memory = memory
        self._marks = marks
        self._metrics = metrics
        self._private = private
        self._clock = clock
        # Without defaults nothing is wished unless a body says so.
        self._silent = not config.defaults and not any(
            its.default for its in config.tenants.values()
        )

    async def serve(self, request: ServerRequest) -> None:
        """A chat completion.

        Raises:
            RequestError: what it says of retrieval is wrong, or not allowed.
        """
        if self._silent and not self._memory.size_bytes and _FIELD not in request.body:
            await self._turns.serve(request)
            return
        asked = self._read(self._turns.keys, request)
        if asked is None:
            await self._turns.serve(request)
            return
        note = Note(Status.OFF, earlier=asked.earlier)
        going = _Going(self, asked, note)
        self._metrics.passages.labels("put_back").inc(len(asked.earlier))
        if asked.fields.get("n", 1) == 1 and (asked.searches or asked.probes):
            await self._turns.serve(_inner(request, asked.with_passages(""), note), going)
        else:  # all samples get the same
            with self._turns.not_served_yet(request):
                body = await going.complete_body(LatencyEstimate(0.0, None))
            await self._turns.serve(_inner(request, body, note))

    def _read(self, keys: KeyRing, request: ServerRequest) -> RetrievalRequest | None:
        try:
            given = json_object(request.body)
        except RequestError:
            return None  # the turn server tells
        tenant = keys.tenant(request.headers)
        return read(given, tenant, self._config, self._memory, self._private)

    async def found(
        self, asked: RetrievalRequest, outlook: LatencyEstimate, note: Note
    ) -> Injection:
        """What the new turn gets; it is remembered before the turn is served, for it shall be
        in the prefix of the next one.

        Raises:
            RequestError: the search failed, and that is what shall become of the request.
        """
        if not asked.searches:
            again = asked.again or Injection.NOTHING
            if asked.again is not None:
                note.status, note.found = Status.REUSED, again.citations
            return again
        wish = asked.wish
        assert wish is not None
        search = Search(
            collection=wish.collection,
            text=wish.query.replace("{question}", asked.question),
            limit=wish.k + len(asked.earlier),  # of which some may be those that are there already
            filter=wish.filter,
            stage=Stage.PREFILL,
            timeout_ms=self._deadline_ms(outlook),
        )
        began_s = self._clock()
        try:
            found = await self._retriever.search(search)
        except WorkerError as error:
            self._searched(note, began_s, Status.FAILED)
            logger.warning("%s", error)
            if wish.on_failure is Failure.FAIL:
                raise RequestError(str(error), status=503, code="retrieval_failed") from error
            note.error = str(error)
            return Injection.NOTHING  # and is not remembered: the next try may do better
        self._searched(note, began_s, Status.DEGRADED if found.degraded else Status.OK)
        chosen = _chosen(found, wish, asked.earlier)
        note.found = tuple(
            Citation(one.id, one.score, asked.number, Stage.PREFILL) for one in chosen
        )
        self._metrics.passages.labels("found").inc(len(chosen))
        text = block(chosen, self._marks()) if chosen else ""
        injection = Injection(wish, text, tuple(note.found))
        self._memory.put(asked.turn, injection)
        return injection

    def _deadline_ms(self, outlook: LatencyEstimate) -> float:
        config = self._config
        budget_ms = outlook.ttft_target_ms or config.ttft_budget_ms
        left_ms = budget_ms - outlook.prefill_ms
        return min(config.max_ms, max(config.min_ms, left_ms))

    def _searched(self, note: Note, began_s: float, status: Status) -> None:
        took_s = self._clock() - began_s
        note.status, note.took_ms = status, 1e3 * took_s
        self._metrics.searches.labels(Stage.PREFILL, status).inc()
        self._metrics.seconds.labels(Stage.PREFILL).observe(took_s)

    def probes(self, asked: RetrievalRequest, note: Note) -> Probes:
        assert asked.wish is not None

        def remember(asides: Sequence[Insertion], reply: str) -> None:
            injection = self._memory.get(asked.turn) or Injection(asked.wish, "", ())
            kept = replace(
                injection,
                citations=tuple(note.found),
                asides=tuple(asides),
                reply=digest_of(reply),
            )
            self._memory.put(asked.turn, kept)

        return Probes(
            wish=asked.wish,
            question=asked.question,
            turn=asked.number,
            earlier=asked.earlier,
            note=note,
            retriever=self._retriever,
            marks=self._marks(),
            metrics=self._metrics,
            remember=remember,
            max_ms=self._config.decode_max_ms,
            room_s=self._config.room_timeout_s,
            clock=self._clock,
        )


@dataclass(frozen=True, slots=True)
class _Going:
    """``serving.hooks.RequestHook`` of one request."""

    stage: RetrievalStage
    asked: RetrievalRequest
    note: Note

    async def complete_body(self, outlook: LatencyEstimate) -> bytes:
        found = await self.stage.found(self.asked, outlook, self.note)
        return self.asked.with_passages(found.text)

    def observer(self) -> StreamObserver | None:
        return self.stage.probes(self.asked, self.note) if self.asked.probes else None


def _chosen(found: Found, wish: Wish, earlier: tuple[Citation, ...]) -> list[Passage]:
    """The best that are good enough and not in the conversation yet."""
    there = {one.id for one in earlier}
    good = [
        one
        for one in found.passages
        if one.id not in there and (wish.threshold is None or one.score >= wish.threshold)
    ]
    return good[: wish.k]


def _inner(request: ServerRequest, body: bytes, note: Note) -> InternalRequest:
    writer = AnnotatingWriter(request, note)
    return InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
