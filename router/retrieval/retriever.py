"""Searching for passages: the protocol, and the pool's HTTP interface behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError

from ..config.retrieval import Stage

_SLACK_S = 0.05  # beyond the search's own deadline, for the way there and back


@dataclass(frozen=True, slots=True)
class Passage:
    """Attributes:
    score: higher is nearer.
    """

    id: str
    score: float
    text: str
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Search:
    collection: str
    text: str
    limit: int
    filter: Any
    stage: Stage
    timeout_ms: float


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    degraded: the deadline came before the search had ended; the best until then.
    """

    passages: list[Passage]
    degraded: bool


class Retriever(Protocol):
    """Whatever finds passages: the pool, or a vector database in its place."""

    async def search(self, search: Search) -> Found:
        """
        Raises:
            WorkerError: there was no answer in time, or none that makes sense.
        """
        ...

    async def close(self) -> None: ...


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


class PoolRetriever:
    """``ppd-pool``'s search, which embeds the text itself.

    Args:
        url: of the pool, without path.
    """

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._client = client

    async def close(self) -> None:
        """The client is its owner's to close."""

    async def search(self, search: Search) -> Found:
        url = f"{self._url}/v1/collections/{quote(search.collection, safe='')}/search"
        body = {
            "text": search.text,
            "limit": search.limit,
            "stage": search.stage,
            "timeout_ms": search.timeout_ms,
            **({} if search.filter is None else {"filter": search.filter}),
        }
        timeout = aiohttp.ClientTimeout(total=search.timeout_ms / 1e3 + _SLACK_S)
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
            raise WorkerError(f"retrieval failed: {response.status} {_told(raw)}")
        try:
            (result,) = msgspec.json.decode(raw, type=_Answer).results
        except (msgspec.MsgspecError, ValueError) as error:
            raise WorkerError(f"retrieval failed: its answer makes no sense: {error}") from error
        if result.degraded and not result.hits:
            raise WorkerError(f"retrieval found nothing in {search.timeout_ms:.0f} ms")
        return Found(
            [Passage(hit.id, hit.score, hit.text, hit.metadata) for hit in result.hits if hit.text],
            result.degraded,
        )


def _told(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")
