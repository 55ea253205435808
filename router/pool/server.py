"""The HTTP API of a pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import generate_latest

from ppd.ann.lanes import Target
from ppd.ann.schedule import Stage
from ppd.ann.space import Rows
from ppd.errors import IndexFileError, Overloaded, PpdError, RequestError

from .collection import ROWS_FILE, Collection
from .config import PoolConfig
from .embeddings import Embeddings
from .filters import Filter
from .metrics import PoolMetrics
from .replies import as_binary, as_json, describe, empty_result, payload_fields, results
from .requests import (
    BINARY,
    CreateBody,
    DeleteBody,
    FeedbackBody,
    PayloadsBody,
    SearchRequest,
    SwapBody,
    UpsertBody,
    parse,
    parse_search,
    require_fit,
)
from .searches import Searches
from .writes import Writes

_log = logging.getLogger("ppd_router.pool")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PoolServer:
    """The routes of a pool.

    Args:
        config: of the pool.
        collections: by name.
        searches: of the pool.
        embeddings: for queries that are text; None: such queries are refused.
        metrics: of the pool.
        warm: is called with every new target before it is searched.
    """

    def __init__(
        self,
        config: PoolConfig,
        collections: dict[str, Collection],
        searches: Searches,
        embeddings: Embeddings | None,
        metrics: PoolMetrics,
        warm: Callable[[Target], None],
    ) -> None:
        self._config = config
        self._collections = collections
        self._searches = searches
        self._writes = Writes(config, collections, embeddings, metrics, warm)
        self._metrics = metrics

    def app(self) -> web.Application:
        """Return the application; its start and stop are those of the searches."""
        app = web.Application(
            middlewares=[errors_as_json], client_max_size=self._config.max_body_bytes
        )
        path = "/v1/collections/{name}"
        app.add_routes(
            [
                web.get("/v1/collections", self._list),
                web.get(path, self._describe),
                web.put(path, self._create),
                web.post(f"{path}/search", self._search),
                web.post(f"{path}/points", self._upsert),
                web.post(f"{path}/delete", self._delete),
                web.post(f"{path}/payloads", self._payloads),
                web.post(f"{path}/rebuild", self._rebuild),
                web.post(f"{path}/swap", self._swap),
                web.post("/v1/feedback", self._feedback),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
            ]
        )
        app.cleanup_ctx.append(self._run_searches)
        return app

    async def _run_searches(self, app: web.Application):  # type: ignore[no-untyped-def]
        self._searches.start()
        try:
            yield
            await self._writes.close()
        finally:
            self._searches.stop()
            await asyncio.gather(*map(self._close, self._collections.values()))

    async def _close(self, collection: Collection) -> None:
        try:
            await asyncio.to_thread(collection.close)
        except IndexFileError as error:
            _log.error("%s: its next start takes longer: %s", collection.name, error)

    async def _list(self, request: web.Request) -> web.Response:
        return as_json({"collections": [describe(one) for one in self._collections.values()]})

    async def _describe(self, request: web.Request) -> web.Response:
        return as_json(describe(self._collection_of(request)))

    async def _search(self, request: web.Request) -> web.Response:
        began_s = time.monotonic()
        collection = self._collection_of(request)
        search = parse_search(await request.read(), request.content_type)
        while True:  # again, if a swap has removed the rows that were found
            exchanges = collection.exchanges
            response = await self._searched(collection, search, request.content_type, began_s)
            if exchanges == collection.exchanges and exchanges % 2 == 0:
                return response

    async def _searched(
        self, collection: Collection, search: SearchRequest, content_type: str, began_s: float
    ) -> web.Response:
        row_filter = Filter.parse(search.filter)
        try:
            left_s = began_s + self._searches.timeout_s(search) - time.monotonic()
            async with asyncio.timeout(left_s):
                vectors = await self._vectors(search, collection)
                plan = await self._searches.plan(collection, search, row_filter)
        except TimeoutError:
            self._searches.note_late(search)
            bodies = [empty_result() for _ in range(search.count)]
        else:  # the engines stop at the deadline, with the hits until then
            found = await self._searches.search(collection, search, plan, vectors, began_s)
            if content_type == BINARY:
                self._searches.note_answered(search, began_s)
                return as_binary(vectors, found, search.limit)
            bodies = await results(collection, vectors, found, search.limit, search.with_payload)
        self._searches.note_answered(search, began_s)
        took_ms = (time.monotonic() - began_s) * 1e3
        metric = collection.space.metric
        return as_json({"results": bodies, "metric": metric, "took_ms": round(took_ms, 3)})

    async def _vectors(self, search: SearchRequest, collection: Collection) -> Rows:
        vectors = search.vectors
        if vectors is None:
            vectors = await self._writes.embedded(search.texts, search.stage)
        require_fit(vectors, collection.space, "vector")
        return vectors

    async def _create(self, request: web.Request) -> web.Response:
        body = parse(await request.read() or b"{}", CreateBody)
        collection, is_new = await self._writes.create(request.match_info["name"], body)
        return as_json(describe(collection), 201 if is_new else 200)

    async def _upsert(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), UpsertBody)
        return as_json({"upserted": await self._writes.upsert(self._collection_of(request), body)})

    async def _delete(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), DeleteBody)
        return as_json({"deleted": await self._writes.delete(self._collection_of(request), body)})

    async def _payloads(self, request: web.Request) -> web.Response:
        collection = self._collection_of(request)
        keys = parse(await request.read(), PayloadsBody).keys
        found = await asyncio.to_thread(collection.payloads.fetch, keys)
        rows = {
            str(key): {"id": payload.id, **payload_fields(payload)}
            for key, payload in found.items()
        }
        return as_json({"rows": rows})

    async def _rebuild(self, request: web.Request) -> web.Response:
        collection = self._collection_of(request)
        await self._writes.rebuild(collection)
        return as_json(describe(collection))

    async def _swap(self, request: web.Request) -> web.Response:
        collection = self._collection_of(request)
        await self._writes.swap(collection, parse(await request.read(), SwapBody))
        return as_json(describe(collection))

    async def _feedback(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), FeedbackBody)
        if not 0 <= body.kv_link_use <= 1:
            raise RequestError("kv_link_use must be 0 to 1", param="kv_link_use")
        if body.token_ms is not None and body.token_ms <= 0:
            raise RequestError("token_ms must be above 0", param="token_ms")
        move = self._searches.feed_back(body)
        return as_json({"move": move, "reserved": self._searches.control.controls.reserved})

    async def _health(self, request: web.Request) -> web.Response:
        if self._searches.broken is not None:
            return as_json({"status": "failed", "why": self._searches.broken}, 503)
        return as_json({"status": "ok", "collections": list(self._collections)})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        metrics, workers = self._metrics, self._searches.workers
        for stage in Stage:
            metrics.waiting.labels(stage).set(workers.waiting(stage))
        metrics.running.set(workers.running())
        controls = self._searches.control.controls
        metrics.reserved.set(controls.reserved)
        metrics.expansion_s.set(self._searches.pace.expansion_s)
        for name, collection in self._collections.items():
            metrics.rows.labels(name).set(collection.count)
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    def _collection_of(self, request: web.Request) -> Collection:
        name = request.match_info["name"]
        if (collection := self._collections.get(name)) is None:
            raise RequestError(f"there is no collection {name!r}", status=404, param="name")
        return collection


def open_collections(folder: Path, warm: Callable[[Target], None]) -> dict[str, Collection]:
    """Open all collections of a folder; a damaged one is logged and left out."""
    collections: dict[str, Collection] = {}
    for path in sorted(folder.glob(f"[!.]*/{ROWS_FILE}")):
        try:
            collections[path.parent.name] = Collection(path.parent, warm)
        except IndexFileError as error:
            _log.error("%s is not served: %s", path.parent.name, error)
    return collections


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a response with a JSON error object (middleware)."""
    try:
        return await handler(request)
    except Overloaded as error:
        response = _failure(error.status, str(error), error.code)
        response.headers["Retry-After"] = f"{error.retry_after_s:.0f}"
        return response
    except RequestError as error:
        return _failure(error.status, str(error), error.code, error.param)
    except PpdError as error:
        _log.error("%s %s: %s", request.method, request.path, error)
        return _failure(503, str(error), None)
    except web.HTTPException as error:
        return _failure(error.status, error.reason, None)
    except Exception:  # noqa: BLE001 - a bug of ours must not cost the connection
        _log.exception("%s %s", request.method, request.path)
        return _failure(500, "a bug of the pool; its log has the trace", "internal_error")


def _failure(status: int, message: str, code: str | None, param: str | None = None) -> web.Response:
    return as_json({"error": {"message": message, "code": code, "param": param}}, status)
