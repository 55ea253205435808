"""The decode stage: searches for passages while a reply is streamed.

The end of the reply is searched for after a number of tokens, or after a token of low confidence.
The stream continues during the search, and while its worker prefills a passage that is new and
good enough. Then the reply is continued behind the passage by an append-prefill.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from ppd.errors import WorkerError
from ppd.marks import Marks

from ..config.retrieval import RetrievalOptions, Stage
from ..serving.internal import chunks_of
from ..serving.resume import Insertion
from .answers import RetrievalReport, Status
from .memory import Citation, ids_in
from .metrics import RetrievalMetrics
from .passages import reply_text
from .retriever import Retriever, Search, limit_beside

logger = logging.getLogger("ppd.router.retrieval")

_TAIL_CHARACTERS = 600  # of the reply, in the text of a search

Remember = Callable[[Sequence[Insertion], str], None]


class Probes:
    """The searches of one streamed reply; a ``serving.hooks.StreamObserver``.

    Args:
        options: of the retrieval.
        question: text of the turn, in front of the reply's text in a search.
        turn: number of the turn, from 1.
        earlier: passages of earlier turns.
        report: gets the passages that the model reads.
        retriever: searches.
        marks: the model's special tokens.
        metrics: of retrieval.
        remember: called with all insertions into the reply, and the reply up to the last one.
        max_ms: deadline of a search.
        room_s: how long the stream's worker may take to prefill a passage.
        clock: seconds, monotonic.

    Attributes:
        found: resolves with the text of a passage; after ``appended`` or ``declined`` it is
            another future.
    """

    def __init__(
        self,
        *,
        options: RetrievalOptions,
        question: str,
        turn: int,
        earlier: Sequence[Citation],
        report: RetrievalReport,
        retriever: Retriever,
        marks: Marks,
        metrics: RetrievalMetrics,
        remember: Remember,
        max_ms: float,
        room_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._question = question
        self._turn = turn
        self._earlier = earlier
        self._report = report
        self._retriever = retriever
        self._marks = marks
        self._metrics = metrics
        self._remember = remember
        self._max_ms = max_ms
        self.room_s = room_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.found: asyncio.Future[str] = self._loop.create_future()
        self._text = ""
        self._tokens = 0  # since the last search
        self._is_unsure = False  # whether one of them had low confidence
        self._remaining = options.max_additions
        self._task: asyncio.Task[None] | None = None
        self._offered: Citation | None = None

    def read(self, block: bytes) -> None:
        """Read events that the client is sent, and start a search when one is due."""
        for chunk in chunks_of(block):
            for choice in chunk.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if isinstance(text, str) and text:
                    self._text += text
                    self._tokens += 1
                self._is_unsure |= self._has_low_confidence(choice.get("logprobs"))
        due = self._is_unsure or self._tokens >= self._options.every_tokens
        if due and self._remaining and self._text and not self._busy():
            self._tokens, self._is_unsure = 0, False
            self._task = self._loop.create_task(self._search())

    def appended(self, appended: tuple[Insertion, ...], stalled_s: float) -> None:
        """Record that the reply continues behind the passage.

        Args:
            appended: all insertions into the reply.
            stalled_s: time in which the stream waited.
        """
        self._metrics.add_stall(stalled_s)
        assert self._offered is not None
        self._report.new = (*self._report.new, self._offered)
        self._metrics.passages.labels("appended").inc()
        self._remember(appended, self._text[: appended[-1][0]])
        self._expect_next()

    def declined(self, stalled_s: float) -> None:
        """Record that the reply continues without the passage.

        Args:
            stalled_s: time in which the stream waited.
        """
        self._metrics.add_stall(stalled_s)
        self._metrics.passages.labels("declined").inc()
        self._expect_next()

    def close(self) -> None:
        """Cancel the search at the end of the stream."""
        if self._task is not None:
            self._task.cancel()
        self.found.cancel()

    def _expect_next(self) -> None:
        self._remaining -= 1
        self._offered = None
        self.found = self._loop.create_future()

    def _busy(self) -> bool:
        """Whether a search is under way, or its passage is not yet appended or declined."""
        searching = self._task is not None and not self._task.done()
        return searching or self.found.done()

    def _has_low_confidence(self, logprobs: object) -> bool:
        """Whether a token has less than the probability that the options name."""
        min_probability = self._options.confidence
        if min_probability is None or not isinstance(logprobs, dict):
            return False
        tokens = logprobs.get("content")
        values = [token.get("logprob") for token in tokens] if isinstance(tokens, list) else []
        return any(
            isinstance(value, float) and math.exp(value) < min_probability for value in values
        )

    async def _search(self) -> None:
        """Search once; a failed search is logged and has no effect on the reply."""
        collection = self._options.collection
        known = ids_in(collection, (*self._earlier, *self._report.new))
        search = Search(
            collection=collection,
            text=f"{self._question}\n{self._text[-_TAIL_CHARACTERS:]}",
            limit=limit_beside(known, 1),
            filter=self._options.filter,
            stage=Stage.DECODE,
            timeout_ms=self._max_ms,
        )
        started_s = self._clock()
        try:
            result = await self._retriever.search(search)
        except WorkerError as error:
            self._metrics.searches.labels(Stage.DECODE, Status.FAILED).inc()
            logger.warning("%s", error)
            return
        finally:
            self._metrics.seconds.labels(Stage.DECODE).observe(self._clock() - started_s)
        status = Status.DEGRADED if result.degraded else Status.OK
        self._metrics.searches.labels(Stage.DECODE, status).inc()
        min_score = self._options.threshold
        for passage in result.passages:
            if passage.id in known or (min_score is not None and passage.score < min_score):
                continue
            self._offered = Citation(
                passage.id, collection, passage.score, self._turn, Stage.DECODE
            )
            self.found.set_result(reply_text(passage, self._marks))
            return
