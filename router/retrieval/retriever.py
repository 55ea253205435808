"""The search for passages: its protocol, and the pool's HTTP interface."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError

from ..config.retrieval import Stage

_ROUND_TRIP_S = 0.05  # added to the search's own deadline
_MAX_LIMIT = 1_024  # of the pool's searches (``ppd.ann``)
_DISTANCE = "l2"  # the pool's metric whose scores are distances


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that a search has found.

    Attributes:
        id: its name in the collection.
        score: by the collection's metric, a distance with a minus sign; higher is nearer.
        text: its text.
        metadata: its other fields; None if it has none.
    """

    id: str
    score: float
    text: str
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """A search for passages.

    Attributes:
        collection: the collection to search in.
        text: the text to search for.
        limit: maximum number of passages.
        filter: of the collection's rows, as the vector database takes it; None for all rows.
        stage: the stage of retrieval.
        timeout_ms: deadline of the search.
    """

    collection: str
    text: str
    limit: int
    filter: Any
    stage: Stage
    timeout_ms: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        passages: the nearest first.
        degraded: whether the deadline ended the search; the passages are its best until then.
    """

    passages: list[Passage]
    degraded: bool


def limit_beside(known: Sized, count: int) -> int:
    """How many passages to search for, so that ``count`` are left without the known ones.

    The pool keeps no more than its limit; of a very long conversation's passages, most are far
    from the new turn.
    """
    return min(_MAX_LIMIT, count + len(known))


class Retriever(Protocol):
    """A source of passages: the pool, or a vector database in its place."""

    async def search(self, search: Search) -> SearchResult:
        """Search for passages.

        Raises:
            WorkerError: there was no answer in time, or a malformed one.
        """
        ...

    async def close(self) -> None:
        """Release the connections that the retriever owns."""
        ...


class _Hit(msgspec.Struct):
    id: str
    score: float
    text: str | None = None
    metadata: dict[str, Any] | None = None


class _Result(msgspec.Struct):
    hits: list[_Hit]
    degraded: bool = False


class _Answer(msgspec.Struct):
    results: list[_Result]
    metric: str = ""


class PoolRetriever:
    """The search of ``ppd-pool``, which embeds the text itself; a ``Retriever``.

    Args:
        url: of the pool, without a path.
        client: an HTTP session; its owner closes it.
    """

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._client = client

    async def close(self) -> None:
        """Do nothing: the session has another owner."""

    async def search(self, search: Search) -> SearchResult:
        """Search for passages; see ``Retriever``."""
        url = f"{self._url}/v1/collections/{quote(search.collection, safe='')}/search"
        body = {
            "text": search.text,
            "limit": search.limit,
            "stage": search.stage,
            "timeout_ms": search.timeout_ms,
            **({} if search.filter is None else {"filter": search.filter}),
        }
        timeout = aiohttp.ClientTimeout(total=search.timeout_ms / 1e3 + _ROUND_TRIP_S)
        try:
            async with self._client.post(
                url,
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise WorkerError(f"retrieval was too late: over {search.timeout_ms:.0f} ms") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerError(f"retrieval failed: {error or type(error).__name__}") from error
        if response.status != 200:
            raise WorkerError(f"retrieval failed: {response.status} {_excerpt(raw)}")
        try:
            answer = msgspec.json.decode(raw, type=_Answer)
            (result,) = answer.results
        except (msgspec.MsgspecError, ValueError) as error:
            raise WorkerError(f"retrieval failed: its answer is malformed: {error}") from error
        if result.degraded and not result.hits:
            raise WorkerError(f"retrieval found nothing in {search.timeout_ms:.0f} ms")
        sign = -1.0 if answer.metric == _DISTANCE else 1.0
        passages = [
            Passage(hit.id, sign * hit.score, hit.text, hit.metadata)
            for hit in result.hits
            if hit.text
        ]
        return SearchResult(passages, result.degraded)


def _excerpt(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")
