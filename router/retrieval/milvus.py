"""Milvus in the pool's place: a ``Retriever`` over pymilvus.

It knows neither stages nor deadlines of its own: whatever is late is given up.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ppd.errors import WorkerError

from ..embedder import Embedder
from .retriever import Found, Passage, Search


class MilvusRetriever:
    """
    Args:
        client: a ``pymilvus.AsyncMilvusClient``.
        text_field: of a row, with the passage.
    """

    def __init__(self, client: Any, embedder: Embedder, text_field: str) -> None:
        self._client = client
        self._embedder = embedder
        self._text_field = text_field

    async def close(self) -> None:
        await self._client.close()

    async def search(self, search: Search) -> Found:
        try:
            async with asyncio.timeout(search.timeout_ms / 1e3):
                vector = await self._embedded(search.text)
                (hits,) = await self._search(search, vector)
        except TimeoutError as error:
            raise WorkerError(f"retrieval was too late: over {search.timeout_ms:.0f} ms") from error
        return Found([self._passage(hit) for hit in hits if self._text(hit)], degraded=False)

    async def _embedded(self, text: str) -> list[float]:
        try:
            (vector,) = await self._embedder.embed([text])
        except WorkerError as error:
            raise WorkerError(f"retrieval failed: {error}") from error
        return vector

    async def _search(self, search: Search, vector: list[float]) -> Any:
        from pymilvus.exceptions import MilvusException

        try:
            return await self._client.search(
                search.collection,
                data=[vector],
                limit=search.limit,
                filter=search.filter or "",
                output_fields=["*"],
            )
        except MilvusException as error:
            raise WorkerError(f"retrieval failed: {error.message}") from error

    def _passage(self, hit: Any) -> Passage:
        entity = dict(hit["entity"])
        metadata = {name: value for name, value in entity.items() if name != self._text_field}
        metadata.pop("vector", None)
        return Passage(str(hit["id"]), float(hit["distance"]), self._text(hit), metadata or None)

    def _text(self, hit: Any) -> str:
        text = hit["entity"].get(self._text_field)
        return text if isinstance(text, str) else ""


def connect(uri: str, token: str) -> Any:
    """A ``pymilvus.AsyncMilvusClient``; the package is an extra.

    Raises:
        WorkerError: the package is missing, or nobody answers at ``uri``.
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
