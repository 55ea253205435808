"""The prefill stage: what a turn asks for is searched for before the turn is served.

The search runs while the request waits to be let in. Its deadline is what the turn's TTFT budget
leaves beside its prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ppd.errors import RequestError, WorkerError

from ..inner import Asked as Request
from ..inner import Inner
from ..keys import KeyRing
from ..requests import Endpoint, json_object
from ..turns import Outlook, TurnServer
from .answers import Note, NotingTaker, Status
from .config import Failure, RetrievalConfig, Wish
from .memory import Citation, Injection, Memory
from .metrics import RetrievalMetrics
from .passages import Marks, block
from .requests import FIELD, Asked, read
from .retriever import Found, Passage, Retriever, Search, Stage

logger = logging.getLogger("ppd.router.retrieval")

_FIELD = f'"{FIELD}"'.encode()


class RetrievalStage:
    """
    Args:
        keys: whose request it is.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        turns: TurnServer,
        config: RetrievalConfig,
        retriever: Retriever,
        memory: Memory,
        marks: Marks,
        metrics: RetrievalMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._turns = turns
        self._config = config
        self._retriever = retriever
        self._memory = memory
        self._marks = marks
        self._metrics = metrics
        self._clock = clock
        # Without defaults nothing is wished unless a body says so.
        self._silent = not config.defaults and not any(
            its.default for its in config.tenants.values()
        )

    async def serve(self, request: Request) -> None:
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
        elif asked.searches:
            await self._serve_searching(request, asked)
        else:
            again = asked.again or Injection.NOTHING
            status = Status.OFF if asked.again is None else Status.REUSED
            note = Note(status, again.citations, asked.earlier)
            self._count_again(asked.earlier, again.citations)
            body = asked.with_passages(again.text)
            await self._turns.serve(_inner(request, body, note))

    async def _serve_searching(self, request: Request, asked: Asked) -> None:
        self._count_again(asked.earlier, ())
        note = Note(Status.OK, earlier=asked.earlier)

        async def completed(outlook: Outlook) -> bytes:
            found = await self._search(asked, outlook, note)
            return asked.with_passages(found.text)

        if asked.fields.get("n", 1) == 1:
            await self._turns.serve(_inner(request, asked.with_passages(""), note), completed)
        else:  # all samples get the same
            body = await completed(Outlook(0.0, None))
            await self._turns.serve(_inner(request, body, note))

    def _read(self, keys: KeyRing, request: Request) -> Asked | None:
        try:
            given = json_object(request.body)
        except RequestError:
            return None  # the turn server tells
        return read(given, keys.tenant(request.headers), self._config, self._memory)

    async def _search(self, asked: Asked, outlook: Outlook, note: Note) -> Injection:
        """What the new turn gets; it is remembered before the turn is served, for it shall be
        in the prefix of the next one.

        Raises:
            RequestError: the search failed, and that is what shall become of the request.
        """
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
        text = block(chosen, self._marks) if chosen else ""
        injection = Injection(wish, text, tuple(note.found))
        self._memory.put(asked.turn, injection)
        return injection

    def _deadline_ms(self, outlook: Outlook) -> float:
        config = self._config
        budget_ms = outlook.ttft_target_ms or config.ttft_budget_ms
        left_ms = budget_ms - outlook.prefill_ms
        return min(config.most_ms, max(config.least_ms, left_ms))

    def _searched(self, note: Note, began_s: float, status: Status) -> None:
        took_s = self._clock() - began_s
        note.status, note.took_ms = status, 1e3 * took_s
        self._metrics.searches.labels(Stage.PREFILL, status).inc()
        self._metrics.seconds.labels(Stage.PREFILL).observe(took_s)

    def _count_again(self, *some: tuple[Citation, ...]) -> None:
        self._metrics.passages.labels("put_back").inc(sum(map(len, some)))


def _chosen(found: Found, wish: Wish, earlier: tuple[Citation, ...]) -> list[Passage]:
    """The best that are good enough and not in the conversation yet."""
    there = {one.id for one in earlier}
    good = [
        one
        for one in found.passages
        if one.id not in there and (wish.threshold is None or one.score >= wish.threshold)
    ]
    return good[: wish.k]


def _inner(request: Request, body: bytes, note: Note) -> Inner:
    taker = NotingTaker(request, note)
    return Inner(Endpoint.CHAT, request.headers, body, request.connection, taker)
