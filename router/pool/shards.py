"""The front of a collection in shards: every shard is searched, and the best hits are merged.

A shard is one or more replicas with the same rows. A shard without a response in time is left out,
and the merged response lists it. A shard that is down costs hits, never the request.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Sequence

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from ppd.ann.engine import Ending
from ppd.ann.schedule import Stage
from ppd.ann.space import Metric
from ppd.errors import Overloaded, RequestError, WorkerError

from .config import PoolConfig
from .metrics import PoolMetrics
from .replies import as_json
from .requests import require_time
from .server import errors_as_json

_log = logging.getLogger("ppd_router.pool")
_HEALTH_S = 0.5  # limit and interval of health checks
_RETRY_S = 1.0
_UNREACHABLE = (aiohttp.ClientError, TimeoutError)


class _Hit(msgspec.Struct):
    id: str
    score: float
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, object] | msgspec.UnsetType | None = msgspec.UNSET


class _Result(msgspec.Struct):
    hits: list[_Hit]
    degraded: bool


class _ShardResults(msgspec.Struct):
    results: list[_Result]
    metric: Metric


class _Head(msgspec.Struct):
    """The fields of a search that the front uses; the shards check all of them."""

    limit: int = 10
    stage: Stage = Stage.PREFILL
    timeout_ms: float | None = None


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class Shard:
    """The replicas of one shard.

    A search is sent to the replica with the fewest searches in flight. A failed replica gets no
    searches until its health check succeeds.

    Args:
        name: of the shard, for metrics and responses.
        replicas: base URLs.
        session: for the requests.
        metrics: of the front.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[str],
        session: aiohttp.ClientSession,
        metrics: PoolMetrics,
    ) -> None:
        self.name = name
        self._session = session
        self._metrics = metrics
        self._in_flight = dict.fromkeys((url.rstrip("/") for url in replicas), 0)
        self._failed: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop the health checks of failed replicas."""
        for task in (tasks := list(self._failed.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def search(self, path: str, body: bytes, within_s: float) -> _ShardResults:
        """Search a replica, and the next one if it fails.

        Args:
            path: of the request.
            body: of the request.
            within_s: time for all replicas together. A replica that has not responded in its
                share of it gets a health check. If this fails, the next replica is searched.

        Raises:
            RequestError: a replica has refused the request as wrong; or, with status 404, no
                replica that responds has the collection.
            Overloaded: the queues of all replicas are full.
            WorkerError: no replica responds.
        """
        full = 0
        unknown: RequestError | None = None
        order = self._by_load()
        for url in order:
            self._in_flight[url] += 1
            response = asyncio.create_task(self._post(url, path, body))
            try:
                await asyncio.wait([response], timeout=within_s / len(self._in_flight))
                if not response.done() and not await self._is_healthy(url):
                    raise TimeoutError("no response, and its health check failed")
                status, data = await response
                if status == 200:
                    return msgspec.json.decode(data, type=_ShardResults)
                if status == 429:  # no failure
                    full += 1
                    continue
                if status == 404:
                    unknown = _error_of(status, data)
                elif 400 <= status < 500:
                    raise _error_of(status, data)
                reason = f"answered {status}"
            except (aiohttp.ClientError, msgspec.MsgspecError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except asyncio.CancelledError:  # out of time
                self._note_failure(url)
                raise
            finally:
                response.cancel()
                self._in_flight[url] -= 1
            self._note_failure(url)
            _log.warning("%s of %s: %s", url, self.name, reason)
        if order and full == len(order):
            raise Overloaded(f"{self.name}: too many searches wait", retry_after_s=_RETRY_S)
        raise unknown or WorkerError(f"no replica of {self.name} answers")

    async def is_up(self) -> bool:
        """Return whether the health check of any replica succeeds."""
        return any(await asyncio.gather(*map(self._is_healthy, self._in_flight)))

    async def send_to_all(self, path: str, body: bytes) -> bool:
        """Send a POST request to all replicas, and return whether any has accepted it."""
        replicas = list(self._in_flight)
        outcomes = await asyncio.gather(
            *(self._post(url, path, body, _HEALTH_S) for url in replicas), return_exceptions=True
        )
        accepted = 0
        for url, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, _UNREACHABLE):
                raise outcome
            if not isinstance(outcome, BaseException) and outcome[0] == 200:
                accepted += 1
            else:
                _log.warning("%s of %s did not accept %s", url, self.name, path)
        return accepted > 0

    async def _post(
        self, url: str, path: str, body: bytes, within_s: float | None = None
    ) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(within_s),
            self._session.post(
                url + path, data=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            return response.status, await response.read()

    async def _is_healthy(self, url: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
        try:
            async with self._session.get(f"{url}/health", timeout=timeout) as response:
                return response.status == 200
        except _UNREACHABLE:
            return False

    def _note_failure(self, url: str) -> None:
        self._metrics.shard_failures.labels(self.name).inc()
        if url not in self._failed:
            self._failed[url] = asyncio.create_task(self._watch(url))

    async def _watch(self, url: str) -> None:
        while not await self._is_healthy(url):  # noqa: ASYNC110 - another process
            await asyncio.sleep(_HEALTH_S)
        del self._failed[url]

    def _by_load(self) -> list[str]:
        healthy = [url for url in self._in_flight if url not in self._failed]
        return sorted(healthy, key=lambda url: (self._in_flight[url], random.random()))


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
        return as_json({"shards": len(accepted), "told": sum(accepted)})

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
        responses: list[_ShardResults] = []
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
            elif isinstance(outcome, _ShardResults):
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


def merge(responses: Sequence[_ShardResults], limit: int) -> list[dict[str, object]]:
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
        hits: dict[str, _Hit] = {}
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


def _error_of(status: int, data: bytes) -> RequestError:
    try:
        refusal = msgspec.json.decode(data, type=_Refusal).error
    except msgspec.MsgspecError:
        return RequestError(f"a shard answered {status}", status=status)
    return RequestError(refusal.message, status=status, param=refusal.param, code=refusal.code)
