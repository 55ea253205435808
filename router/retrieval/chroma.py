"""A Chroma server in the pool's place, by its HTTP interface (version 2, Chroma 1.x).

It has neither stages nor deadlines of its own; a search past its deadline is cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError

from ..embedder import Embedder
from .retriever import Passage, Search, SearchResult

_INCLUDE = ("documents", "metadatas", "distances")
_MAX_COLLECTIONS = 1024  # whose ids are kept

A = TypeVar("A")


class _Collection(msgspec.Struct):
    id: str


class _Found(msgspec.Struct):
    """Lists of one list each, because a query may have several vectors."""

    ids: list[list[str]]
    distances: list[list[float | None]]
    documents: list[list[str | None]]
    metadatas: list[list[dict[str, Any] | None]]


class _GoneError(Exception):
    """The collection of that id was deleted."""


class ChromaRetriever:
    """The search of a Chroma server; a ``Retriever``.

    Args:
        url: of the server, without a path.
        tenant: of the collections.
        database: of the collections.
        token: of the server; "" for none.
        client: an HTTP session; its owner closes it.
        embedder: embeds the text of a search.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str,
        database: str,
        token: str,
        client: aiohttp.ClientSession,
        embedder: Embedder,
    ) -> None:
        path = f"api/v2/tenants/{quote(tenant, safe='')}/databases/{quote(database, safe='')}"
        self._url = f"{url.rstrip('/')}/{path}/collections"
        self._client = client
        self._embedder = embedder
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers |= {"X-Chroma-Token": token, "Authorization": f"Bearer {token}"}
        self._ids: dict[str, str] = {}

    async def close(self) -> None:
        """Do nothing: the session has another owner."""

    async def search(self, search: Search) -> SearchResult:
        """Search for passages; see ``Retriever``."""
        try:
            async with asyncio.timeout(search.timeout_ms / 1e3):
                found = await self._found(search)
        except TimeoutError as error:
            raise WorkerError(f"retrieval was too late: over {search.timeout_ms:.0f} ms") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerError(f"retrieval failed: {error or type(error).__name__}") from error
        except WorkerError as error:
            raise WorkerError(f"retrieval failed: {error}") from error
        return SearchResult(list(_passages(found)), degraded=False)

    async def _found(self, search: Search) -> _Found:
        (vector,) = await self._embedder.embed([search.text])
        body = orjson.dumps(
            {
                "query_embeddings": [vector],
                "n_results": search.limit,
                "include": _INCLUDE,
                **({} if search.filter is None else {"where": search.filter}),
            }
        )
        was_known = search.collection in self._ids
        try:
            return await self._query(await self._id(search.collection), body)
        except _GoneError as gone:
            self._ids.pop(search.collection, None)
            if not was_known:
                raise WorkerError(str(gone)) from gone
        try:  # a collection of that name may have been made anew
            return await self._query(await self._id(search.collection), body)
        except _GoneError as gone:
            raise WorkerError(str(gone)) from gone

    async def _id(self, name: str) -> str:
        """The id of a collection; its name is resolved once."""
        if (known := self._ids.get(name)) is not None:
            return known
        raw = await self._answer("GET", f"{self._url}/{quote(name, safe='')}")
        if len(self._ids) >= _MAX_COLLECTIONS:
            self._ids.clear()
        self._ids[name] = found = _decoded(raw, _Collection).id
        return found

    async def _query(self, collection_id: str, body: bytes) -> _Found:
        path = f"{self._url}/{quote(collection_id, safe='')}/query"
        return _decoded(await self._answer("POST", path, body), _Found)

    async def _answer(self, method: str, url: str, body: bytes | None = None) -> bytes:
        async with self._client.request(method, url, data=body, headers=self._headers) as response:
            raw = await response.read()
        if response.status == 404:
            raise _GoneError(f"404 {_excerpt(raw)}")
        if response.status != 200:
            raise WorkerError(f"{response.status} {_excerpt(raw)}")
        return raw


def _decoded(raw: bytes, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WorkerError(f"its answer is malformed: {error}") from error


def _passages(found: _Found) -> list[Passage]:
    """The passages of the first and only vector; rows without text are left out."""
    columns = (found.ids, found.distances, found.documents, found.metadatas)
    if any(len(column) != 1 for column in columns):
        raise WorkerError("retrieval failed: its answer is malformed: not one list for one vector")
    rows = zip(*(column[0] for column in columns), strict=False)
    return [
        Passage(name, -(distance or 0.0), text, metadata or None)
        for name, distance, text, metadata in rows
        if text
    ]


def _excerpt(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")
