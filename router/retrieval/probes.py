"""The decode stage: while a reply is generated, what it says is searched for now and then.

The stream goes on meanwhile, and while its worker prefills a passage that is good enough and new.
Then it is left, and goes on behind the passage by an append-prefill.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from ppd.errors import WorkerError
from ppd.marks import Marks

from ..config.retrieval import Stage, Wish
from ..serving.internal import chunks_of
from ..serving.resume import Insertion
from .answers import Note, Status
from .memory import Citation
from .metrics import RetrievalMetrics
from .passages import aside
from .retriever import Retriever, Search

logger = logging.getLogger("ppd.router.retrieval")

_TAIL_CHARACTERS = 600  # of the reply, that are searched for

Remember = Callable[[Sequence[Insertion], str], None]


class Probes:
    """A ``serving.hooks.StreamObserver``.

    Args:
        earlier: passages that the conversation has.
        note: gets what is found.
        remember: gets what the model has read in its reply, and the reply so far.
        max_ms: of a search.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        wish: Wish,
        question: str,
        turn: int,
        earlier: Sequence[Citation],
        note: Note,
        retriever: Retriever,
        marks: Marks,
        metrics: RetrievalMetrics,
        remember: Remember,
        max_ms: float,
        room_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._wish = wish
        self._question = question
        self._turn = turn
        self._earlier = earlier
        self._note = note
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
        self._tokens = 0  # since the last probe
        self._doubts = False
        self._left = wish.max_additions
        self._probe: asyncio.Task[None] | None = None
        self._offered: Citation | None = None

    def read(self, block: bytes) -> None:
        for chunk in chunks_of(block):
            for choice in chunk.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if isinstance(text, str) and text:
                    self._text += text
                    self._tokens += 1
                self._doubts |= self._is_unsure(choice.get("logprobs"))
        due = self._doubts or self._tokens >= self._wish.every_tokens
        if due and self._left and self._text and not self._busy():
            self._tokens, self._doubts = 0, False
            self._probe = self._loop.create_task(self._search())

    def appended(self, appended: tuple[Insertion, ...], stalled_s: float) -> None:
        self._metrics.stalled_for(stalled_s)
        assert self._offered is not None
        self._note.found = (*self._note.found, self._offered)
        self._metrics.passages.labels("appended").inc()
        self._remember(appended, self._text[: appended[-1][0]])
        self._left -= 1
        self._offered = None
        self.found = self._loop.create_future()

    def declined(self, stalled_s: float) -> None:
        self._metrics.stalled_for(stalled_s)
        self._metrics.passages.labels("declined").inc()
        self._left -= 1
        self._offered = None
        self.found = self._loop.create_future()

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        self.found.cancel()

    def _busy(self) -> bool:
        """Something is searched for, or was found and is not read yet."""
        searching = self._probe is not None and not self._probe.done()
        return searching or self.found.done()

    def _is_unsure(self, logprobs: object) -> bool:
        """Whether a token came with less than the wished confidence."""
        least = self._wish.confidence
        if least is None or not isinstance(logprobs, dict):
            return False
        some = logprobs.get("content")
        told = [one.get("logprob") for one in some] if isinstance(some, list) else []
        return any(isinstance(one, float) and math.exp(one) < least for one in told)

    async def _search(self) -> None:
        """Whatever goes wrong here costs the reply nothing."""
        known = {one.id for one in (*self._earlier, *self._note.found)}
        search = Search(
            collection=self._wish.collection,
            text=f"{self._question}\n{self._text[-_TAIL_CHARACTERS:]}",
            limit=1 + len(known),
            filter=self._wish.filter,
            stage=Stage.DECODE,
            timeout_ms=self._max_ms,
        )
        began_s = self._clock()
        try:
            found = await self._retriever.search(search)
        except WorkerError as error:
            self._metrics.searches.labels(Stage.DECODE, Status.FAILED).inc()
            logger.warning("%s", error)
            return
        finally:
            self._metrics.seconds.labels(Stage.DECODE).observe(self._clock() - began_s)
        status = Status.DEGRADED if found.degraded else Status.OK
        self._metrics.searches.labels(Stage.DECODE, status).inc()
        least = self._wish.threshold
        for one in found.passages:
            if one.id in known or (least is not None and one.score < least):
                continue
            self._offered = Citation(one.id, one.score, self._turn, Stage.DECODE)
            self.found.set_result(aside(one, self._marks))
            return
