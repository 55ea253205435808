"""A Milvus server in the pool's place.

It has neither stages nor deadlines of its own; a search past its deadline is cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ppd.errors import WorkerError

from ..embedder import Embedder
from .retriever import Passage, Search, SearchResult

_DISTANCES = {"L2", "HAMMING", "JACCARD"}  # metrics whose scores fall with nearness
_MAX_COLLECTIONS = 1024


class MilvusRetriever:
    """The search of a Milvus server; a ``Retriever``.

    Args:
        client: a ``pymilvus.AsyncMilvusClient``; the retriever closes it.
        embedder: embeds the text of a search.
        text_field: the field of a row that holds the passage's text.
    """

    def __init__(self, client: Any, embedder: Embedder, text_field: str) -> None:
        self._client = client
        self._embedder = embedder
        self._text_field = text_field
        self._signs: dict[str, float] = {}

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    async def search(self, search: Search) -> SearchResult:
        """Search for passages; see ``Retriever``."""
        from pymilvus.exceptions import MilvusException

        try:
            async with asyncio.timeout(search.timeout_ms / 1e3):
                vector = await self._embed(search.text)
                (hits,) = await self._search(search, vector)
                sign = await self._sign(search.collection)
        except TimeoutError as error:
            raise WorkerError(f"retrieval was too late: over {search.timeout_ms:.0f} ms") from error
        except MilvusException as error:
            raise WorkerError(f"retrieval failed: {error.message}") from error
        passages = [self._passage(hit, sign) for hit in hits if self._text(hit)]
        return SearchResult(passages, degraded=False)

    async def _embed(self, text: str) -> list[float]:
        try:
            (vector,) = await self._embedder.embed([text])
        except WorkerError as error:
            raise WorkerError(f"retrieval failed: {error}") from error
        return vector

    async def _search(self, search: Search, vector: list[float]) -> Any:
        return await self._client.search(
            search.collection,
            data=[vector],
            limit=search.limit,
            filter=search.filter or "",
            output_fields=["*"],
        )

    async def _sign(self, collection: str) -> float:
        """The factor on scores of a collection: -1 for distances. It is resolved once."""
        if (known := self._signs.get(collection)) is not None:
            return known
        metrics = set()
        for index in await self._client.list_indexes(collection):
            about = await self._client.describe_index(collection, index)
            metrics.add(about.get("metric_type"))
        if len(self._signs) >= _MAX_COLLECTIONS:
            self._signs.clear()
        self._signs[collection] = sign = -1.0 if metrics & _DISTANCES else 1.0
        return sign

    def _passage(self, hit: Any, sign: float) -> Passage:
        entity = dict(hit["entity"])
        metadata = {name: value for name, value in entity.items() if name != self._text_field}
        metadata.pop("vector", None)
        score = sign * float(hit["distance"])
        return Passage(str(hit["id"]), score, self._text(hit), metadata or None)

    def _text(self, hit: Any) -> str:
        text = hit["entity"].get(self._text_field)
        return text if isinstance(text, str) else ""


def connect(uri: str, token: str) -> Any:
    """Connect to a Milvus server.

    Args:
        uri: of the server.
        token: the user's token; "" for none.

    Returns:
        A ``pymilvus.AsyncMilvusClient``; the package is an extra.

    Raises:
        WorkerError: the package is missing, or no server answers at ``uri``.
    """
    try:
        from pymilvus import AsyncMilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError as error:
        raise WorkerError("retrieval.milvus needs the package pymilvus") from error
    try:
        return AsyncMilvusClient(uri=uri, token=token)
    except MilvusException as error:
        raise WorkerError(f"retrieval.milvus: {uri}: {error.message}") from error
