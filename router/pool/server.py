"""The pool over HTTP: collections, searches, writes, feedback, health, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web
from prometheus_client import generate_latest

from ppd.ann.engine import Ending, Found
from ppd.ann.schedule import Stage
from ppd.ann.space import Rows
from ppd.errors import IndexFileError, Overloaded, PpdError, RequestError

from .collection import ROWS_FILE, Collection
from .config import PoolConfig
from .embeddings import Embeddings
from .filters import Filter
from .metrics import PoolMetrics
from .payloads import Payload
from .requests import (
    BINARY,
    MOST_POINTS,
    Asked,
    DeleteBody,
    FeedbackBody,
    PayloadsBody,
    UpsertBody,
    answer,
    parse,
    parse_search,
    require_fit,
    rows_of,
)
from .searches import Searches

_log = logging.getLogger("ppd_router.pool")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PoolServer:
    """
    Args:
        embeddings: for queries that are text; None: none are taken.
    """

    def __init__(
        self,
        config: PoolConfig,
        collections: dict[str, Collection],
        searches: Searches,
        embeddings: Embeddings | None,
        metrics: PoolMetrics,
    ) -> None:
        self._config = config
        self._collections = collections
        self._searches = searches
        self._embeddings = embeddings
        self._metrics = metrics

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[errors_as_json], client_max_size=self._config.max_body_bytes
        )
        one = "/v1/collections/{name}"
        app.add_routes(
            [
                web.get("/v1/collections", self._list),
                web.get(one, self._describe),
                web.post(f"{one}/search", self._search),
                web.post(f"{one}/points", self._upsert),
                web.post(f"{one}/delete", self._delete),
                web.post(f"{one}/payloads", self._payloads),
                web.post(f"{one}/rebuild", self._rebuild),
                web.post("/v1/feedback", self._feedback),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
            ]
        )
        app.cleanup_ctx.append(self._run_searches)
        return app

    async def _run_searches(self, app: web.Application):  # type: ignore[no-untyped-def]
        self._searches.start()
        yield
        self._searches.stop()
        for collection in self._collections.values():
            collection.payloads.close()

    async def _list(self, request: web.Request) -> web.Response:
        return _json({"collections": [_shown(one) for one in self._collections.values()]})

    async def _describe(self, request: web.Request) -> web.Response:
        return _json(_shown(self._named(request)))

    async def _search(self, request: web.Request) -> web.Response:
        began_s = time.monotonic()
        collection = self._named(request)
        asked = parse_search(await request.read(), request.content_type)
        wanted = Filter.parse(asked.filter)
        vectors = await self._vectors(asked)
        require_fit(vectors, collection.space.dimensions, "vector")
        found = await self._searches.search(collection, asked, wanted, vectors)
        scores = _scores(collection, vectors, found, asked.limit)
        if request.content_type == BINARY:
            keys = np.stack([_keys(one) for one in found])
            late = np.array([one.ending is Ending.DEADLINE for one in found], np.uint8)
            return web.Response(body=answer(keys, scores, late), content_type=BINARY)
        results = await self._results(collection, asked, found, scores)
        took_ms = (time.monotonic() - began_s) * 1e3
        metric = collection.space.metric
        return _json({"results": results, "metric": metric, "took_ms": round(took_ms, 3)})

    async def _vectors(self, asked: Asked) -> Rows:
        if asked.vectors is not None:
            return asked.vectors
        if self._embeddings is None:
            raise RequestError("text queries need embeddings_url or sentence_model")
        return await self._embeddings.embed(asked.texts)

    async def _results(
        self, collection: Collection, asked: Asked, found: list[Found], scores: Rows
    ) -> list[dict[str, object]]:
        nodes = np.concatenate([one.nodes[one.nodes >= 0] for one in found])
        target = found[0].search.target
        fetched = await asyncio.to_thread(collection.payloads_of, target, nodes)
        rest = iter(fetched)
        results: list[dict[str, object]] = []
        for one, row in zip(found, scores.tolist(), strict=True):
            found_rows = list(islice(rest, int((one.nodes >= 0).sum())))
            hits = [
                _hit(payload, row[i], asked.with_payload)
                for i, payload in enumerate(found_rows)
                if payload is not None
            ]
            results.append({"hits": hits, "degraded": one.ending is Ending.DEADLINE})
        return results

    async def _upsert(self, request: web.Request) -> web.Response:
        collection = self._named(request)
        points = parse(await request.read(), UpsertBody).points
        if not 0 < len(points) <= MOST_POINTS:
            raise RequestError(f"a request has 1 to {MOST_POINTS} points, this one {len(points)}")
        if len({one.id for one in points}) < len(points):
            raise RequestError("an id comes twice", param="points")
        rows = rows_of([one.vector for one in points], "points")
        require_fit(rows, collection.space.dimensions, "points")
        payloads = [Payload(one.id, one.text, one.metadata) for one in points]
        await asyncio.to_thread(collection.upsert, payloads, rows)
        self._metrics.writes.labels(collection.name, "upsert").inc(len(points))
        return _json({"upserted": len(points)})

    async def _delete(self, request: web.Request) -> web.Response:
        collection = self._named(request)
        ids = parse(await request.read(), DeleteBody).ids
        gone = await asyncio.to_thread(collection.delete, ids)
        self._metrics.writes.labels(collection.name, "delete").inc(gone)
        return _json({"deleted": gone})

    async def _payloads(self, request: web.Request) -> web.Response:
        collection = self._named(request)
        keys = parse(await request.read(), PayloadsBody).keys
        found = await asyncio.to_thread(collection.payloads.fetch, keys)
        rows = {str(key): {"id": one.id, **_payload(one)} for key, one in found.items()}
        return _json({"rows": rows})

    async def _rebuild(self, request: web.Request) -> web.Response:
        collection = self._named(request)
        await asyncio.to_thread(collection.rebuild, self._config.engines)
        self._metrics.writes.labels(collection.name, "rebuild").inc()
        return _json(_shown(collection))

    async def _feedback(self, request: web.Request) -> web.Response:
        given = parse(await request.read(), FeedbackBody)
        for name in ("kv_link_use", "decode_stall"):
            if not 0 <= getattr(given, name) <= 1:
                raise RequestError(f"{name} must be 0 to 1", param=name)
        move = self._searches.feed_back(
            given.kv_link_use, given.decode_stall, given.prefill_wait_p95_ms
        )
        controls = self._searches.control.controls
        told = {"reserved": controls.reserved, "flush_ms": controls.flush_s * 1e3}
        return _json({"move": move, **told})

    async def _health(self, request: web.Request) -> web.Response:
        if self._searches.broken is not None:
            return _json({"status": "failed", "why": self._searches.broken}, 503)
        return _json({"status": "ok", "collections": list(self._collections)})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        metrics, workers = self._metrics, self._searches.workers
        for stage in Stage:
            metrics.waiting.labels(stage).set(workers.waiting(stage))
        metrics.running.set(workers.running())
        controls = self._searches.control.controls
        metrics.reserved.set(controls.reserved)
        metrics.flush_s.set(controls.flush_s)
        metrics.expansion_s.set(self._searches.pace.expansion_s)
        for name, collection in self._collections.items():
            metrics.rows.labels(name).set(collection.count)
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    def _named(self, request: web.Request) -> Collection:
        name = request.match_info["name"]
        if (found := self._collections.get(name)) is None:
            raise RequestError(f"there is no collection {name!r}", status=404, param="name")
        return found


def open_collections(folder: Path) -> dict[str, Collection]:
    """All that are in a folder.

    Raises:
        IndexFileError: one is damaged, or there is none.
    """
    found = {path.parent.name: path.parent for path in folder.glob(f"[!.]*/{ROWS_FILE}")}
    if not found:
        raise IndexFileError(f"{folder}: no collection is in it; ppd-pool build makes one")
    return {name: Collection(path) for name, path in sorted(found.items())}


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever is raised, as clients of this project know errors."""
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


def _failure(status: int, message: str, code: str | None, param: str | None = None) -> web.Response:
    return _json({"error": {"message": message, "code": code, "param": param}}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _shown(collection: Collection) -> dict[str, object]:
    snapshot = collection.target.snapshot
    return {
        "name": collection.name,
        "rows": collection.count,
        "dimensions": snapshot.space.dimensions,
        "metric": snapshot.space.metric,
        "precision": snapshot.precision,
        "degree": snapshot.graph.neighbours.shape[1],
    }


def _scores(collection: Collection, vectors: Rows, found: list[Found], limit: int) -> Rows:
    near = np.full((len(found), limit), np.inf, np.float32)
    for i, one in enumerate(found):
        near[i, : one.near.size] = one.near
    return collection.space.scores(vectors, near)


def _keys(found: Found) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    keys = found.search.target.snapshot.keys[found.nodes]
    return np.where(found.nodes >= 0, keys, -1)


def _hit(payload: Payload, score: float, with_payload: bool) -> dict[str, object]:
    hit: dict[str, object] = {"id": payload.id, "score": score}
    return hit | _payload(payload) if with_payload else hit


def _payload(one: Payload) -> dict[str, object]:
    return {"text": one.text, "metadata": one.metadata}
