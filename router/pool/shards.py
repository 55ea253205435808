"""The front of a collection in shards: every shard is searched, and the best hits are merged.

A shard is one or more replicas with the same rows. A shard without a response in time is left out,
and the merged response lists it. A shard that is down costs hits, never the request.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from ppd.ann.schedule import Stage
from ppd.ann.searches import Ending
from ppd.ann.space import Metric
from ppd.errors import Overloaded, RequestError, WorkerError

from .config import PoolConfig
from .metrics import PoolMetrics
from .replies import as_json
from .requests import require_time
from .server import errors_as_json
from .shard import Hit, Shard, ShardResults


class _Head(msgspec.Struct):
    """The fields of a search that the front uses; the shards check all of them."""

    limit: int = 10
    stage: Stage = Stage.PREFILL
    timeout_ms: float | None = None


class ShardsServer:
    """The routes of a front of shards. It has searches only: rows are written to their pool.

    Args:
        config: of the front.
        session: for requests to the shards.
        metrics: of the front.
    """

    def __init__(
        self, config: PoolConfig, session: aiohttp.ClientSession, metrics: PoolMetrics
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._shards = [
            Shard(f"shard{i}", replicas, session, metrics)
            for i, replicas in enumerate(config.shards)
        ]

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(
            middlewares=[errors_as_json], client_max_size=self._config.max_body_bytes
        )
        app.add_routes(
            [
                web.post("/v1/collections/{name}/search", self._search),
                web.post("/v1/feedback", self._feedback),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
            ]
        )
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        for shard in self._shards:
            await shard.close()

    async def _feedback(self, request: web.Request) -> web.Response:
        """Forward feedback to the control loops of all pools."""
        body = await request.read()
        accepted = await asyncio.gather(
            *(shard.send_to_all(request.path, body) for shard in self._shards)
        )
        if not any(accepted):
            raise WorkerError("no shard took the feedback")
        return as_json({"shards": len(accepted), "accepted": sum(accepted)})

    async def _search(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            raise RequestError("a front of shards takes JSON only", status=415)
        began_s = time.monotonic()
        body = await request.read()
        head = _head(body)
        timeout_s = (head.timeout_ms or self._config.default_timeout_ms) / 1e3
        within_s = timeout_s + self._config.shard_slack_s
        tasks = [
            asyncio.create_task(shard.search(request.path, body, within_s))
            for shard in self._shards
        ]
        try:
            await asyncio.wait(tasks, timeout=within_s)
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        responses: list[ShardResults] = []
        missing: list[str] = []
        full: list[Overloaded] = []
        unknown: list[RequestError] = []
        for shard, outcome in zip(self._shards, done, strict=True):
            if isinstance(outcome, Overloaded):
                full.append(outcome)
                missing.append(shard.name)
            elif isinstance(outcome, RequestError) and outcome.status == 404:
                unknown.append(outcome)
                missing.append(shard.name)
            elif isinstance(outcome, RequestError):
                raise outcome
            elif isinstance(outcome, ShardResults):
                responses.append(outcome)
            elif isinstance(outcome, WorkerError | asyncio.CancelledError):
                missing.append(shard.name)
            else:
                raise outcome
        if len(full) == len(self._shards):
            self._metrics.searches.labels(head.stage, "refused").inc()
            raise full[0]
        if len(unknown) == len(self._shards):
            raise unknown[0]
        if not responses:
            self._metrics.searches.labels(head.stage, Ending.FAILED).inc()
            raise WorkerError(f"no shard answers: {', '.join(missing)}")
        results = merge(responses, head.limit)
        for result in results:
            result["degraded"] = result["degraded"] or bool(missing)
            ending = Ending.DEADLINE if result["degraded"] else Ending.COMPLETE
            self._metrics.searches.labels(head.stage, ending).inc()
        took_s = time.monotonic() - began_s
        self._metrics.seconds.labels(head.stage).observe(took_s)
        merged = {
            "results": results,
            "metric": responses[0].metric,
            "took_ms": round(took_s * 1e3, 3),
            "partial": bool(missing),
            "missing": missing,
        }
        return as_json(merged)

    async def _health(self, request: web.Request) -> web.Response:
        """Return the state of all shards; 503 if none is up."""
        up = await asyncio.gather(*(shard.is_up() for shard in self._shards))
        missing = [shard.name for shard, is_up in zip(self._shards, up, strict=True) if not is_up]
        status = "ok" if not missing else "partial" if any(up) else "failed"
        state = {"status": status, "shards": len(self._shards), "missing": missing}
        return as_json(state, 200 if any(up) else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), content_type="text/plain")


def merge(responses: Sequence[ShardResults], limit: int) -> list[dict[str, object]]:
    """Return the best hits of all shards for each query, without duplicate ids; ties by id.

    Args:
        responses: of the shards, with the same queries.
        limit: hits of each query.
    """
    if not responses:
        return []
    smaller_is_better = responses[0].metric is Metric.L2
    sign = 1.0 if smaller_is_better else -1.0
    merged: list[dict[str, object]] = []
    for parts in zip(*(response.results for response in responses), strict=True):
        hits: dict[str, Hit] = {}
        for hit in (hit for part in parts for hit in part.hits):
            known = hits.get(hit.id)
            if known is None or sign * hit.score < sign * known.score:
                hits[hit.id] = hit
        best = heapq.nsmallest(limit, hits.values(), key=lambda hit: (sign * hit.score, hit.id))
        merged.append(
            {
                "hits": [msgspec.to_builtins(hit) for hit in best],
                "degraded": any(part.degraded for part in parts),
            }
        )
    return merged


def _head(body: bytes) -> _Head:
    try:
        head = msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is wrong: {error}") from error
    require_time(head.timeout_ms)
    return head
