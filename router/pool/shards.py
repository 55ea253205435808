"""A collection that is spread over several pools: each is asked, the best of all answers is given.

A shard is one or more replicas with the same rows. Whoever does not answer in time is left out, and
the answer says so: a shard that is down costs results, never the request.
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
_HEALTH_S = 0.5  # in which a replica must say that it is well
_RETRY_S = 1.0
_SILENT = (aiohttp.ClientError, TimeoutError)


class _Hit(msgspec.Struct):
    id: str
    score: float
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, object] | msgspec.UnsetType | None = msgspec.UNSET


class _Result(msgspec.Struct):
    hits: list[_Hit]
    degraded: bool


class _Answer(msgspec.Struct):
    results: list[_Result]
    metric: Metric


class _Head(msgspec.Struct):
    """What the front must know of a search; the shards look at all of it."""

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
    """One shard's replicas, the one with the fewest searches under way asked first.

    One that failed is not asked again before it says that it is well.
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
        self._under_way = dict.fromkeys((url.rstrip("/") for url in replicas), 0)
        self._failed: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        for task in (tasks := list(self._failed.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def search(self, path: str, body: bytes, within_s: float) -> _Answer:
        """
        Args:
            within_s: a replica that is silent for its part of it is asked whether it is well; one
                that is not leaves the rest to the next.

        Raises:
            RequestError: a replica says that the request is wrong; the others would, too. Or, with
                404, all that answer do not have the collection.
            Overloaded: every replica has its queues full.
            WorkerError: no replica answers.
        """
        full = 0
        unknown: RequestError | None = None
        order = self._in_order()
        for url in order:
            self._under_way[url] += 1
            asked = asyncio.create_task(self._ask(url, path, body))
            try:
                await asyncio.wait([asked], timeout=within_s / len(self._under_way))
                if not asked.done() and not await self._is_well(url):
                    raise TimeoutError("it is silent, and not well")
                status, data = await asked
                if status == 200:
                    return msgspec.json.decode(data, type=_Answer)
                if status == 429:  # it is well
                    full += 1
                    continue
                if status == 404:
                    unknown = _refused(status, data)
                elif 400 <= status < 500:
                    raise _refused(status, data)
                why = f"answered {status}"
            except (aiohttp.ClientError, msgspec.MsgspecError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            except asyncio.CancelledError:  # out of time
                self._note_failure(url)
                raise
            finally:
                asked.cancel()
                self._under_way[url] -= 1
            self._note_failure(url)
            _log.warning("%s of %s: %s", url, self.name, why)
        if order and full == len(order):
            raise Overloaded(f"{self.name}: too many searches wait", retry_after_s=_RETRY_S)
        raise unknown or WorkerError(f"no replica of {self.name} answers")

    async def is_up(self) -> bool:
        """Whether any replica says that it is well."""
        return any(await asyncio.gather(*map(self._is_well, self._under_way)))

    async def tell(self, path: str, body: bytes) -> bool:
        """All replicas; whether any has heard it."""
        replicas = list(self._under_way)
        told = await asyncio.gather(
            *(self._ask(url, path, body, _HEALTH_S) for url in replicas), return_exceptions=True
        )
        for url, heard in zip(replicas, told, strict=True):
            if isinstance(heard, BaseException) and not isinstance(heard, _SILENT):
                raise heard
            if isinstance(heard, BaseException) or heard[0] != 200:
                _log.warning("%s of %s was not told %s", url, self.name, path)
        return any(not isinstance(heard, BaseException) and heard[0] == 200 for heard in told)

    async def _ask(
        self, url: str, path: str, body: bytes, within_s: float | None = None
    ) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(within_s),
            self._session.post(
                url + path, data=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            return response.status, await response.read()

    async def _is_well(self, url: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
        try:
            async with self._session.get(f"{url}/health", timeout=timeout) as response:
                return response.status == 200
        except _SILENT:
            return False

    def _note_failure(self, url: str) -> None:
        self._metrics.shard_failures.labels(self.name).inc()
        if url not in self._failed:
            self._failed[url] = asyncio.create_task(self._until_well(url))

    async def _until_well(self, url: str) -> None:
        while not await self._is_well(url):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_HEALTH_S)
        del self._failed[url]

    def _in_order(self) -> list[str]:
        trusted = [url for url in self._under_way if url not in self._failed]
        return sorted(trusted, key=lambda url: (self._under_way[url], random.random()))


class ShardsServer:
    """Searches only: rows are written to the pool that has them."""

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
        """For the control loop of every pool."""
        body = await request.read()
        told = await asyncio.gather(*(shard.tell(request.path, body) for shard in self._shards))
        if not any(told):
            raise WorkerError("no shard took the feedback")
        return as_json({"shards": len(told), "told": sum(told)})

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
        answers: list[_Answer] = []
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
            elif isinstance(outcome, _Answer):
                answers.append(outcome)
            elif isinstance(outcome, WorkerError | asyncio.CancelledError):
                missing.append(shard.name)
            else:
                raise outcome
        if len(full) == len(self._shards):
            self._metrics.searches.labels(head.stage, "refused").inc()
            raise full[0]
        if len(unknown) == len(self._shards):
            raise unknown[0]
        if not answers:
            self._metrics.searches.labels(head.stage, Ending.FAILED).inc()
            raise WorkerError(f"no shard answers: {', '.join(missing)}")
        results = merge(answers, head.limit)
        for result in results:
            result["degraded"] = result["degraded"] or bool(missing)
            ending = Ending.DEADLINE if result["degraded"] else Ending.COMPLETE
            self._metrics.searches.labels(head.stage, ending).inc()
        took_s = time.monotonic() - began_s
        self._metrics.seconds.labels(head.stage).observe(took_s)
        told = {
            "results": results,
            "metric": answers[0].metric,
            "took_ms": round(took_s * 1e3, 3),
            "partial": bool(missing),
            "missing": missing,
        }
        return as_json(told)

    async def _health(self, request: web.Request) -> web.Response:
        """503: no shard is there, and no search can be answered."""
        up = await asyncio.gather(*(shard.is_up() for shard in self._shards))
        missing = [shard.name for shard, is_up in zip(self._shards, up, strict=True) if not is_up]
        status = "ok" if not missing else "partial" if any(up) else "failed"
        told = {"status": status, "shards": len(self._shards), "missing": missing}
        return as_json(told, 200 if any(up) else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), content_type="text/plain")


def merge(answers: Sequence[_Answer], limit: int) -> list[dict[str, object]]:
    """The best ``limit`` hits of all, for each query, each id once; ties by id."""
    if not answers:
        return []
    nearest_is_least = answers[0].metric is Metric.L2
    sign = 1.0 if nearest_is_least else -1.0
    merged: list[dict[str, object]] = []
    for parts in zip(*(answer.results for answer in answers), strict=True):
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


def _refused(status: int, data: bytes) -> RequestError:
    try:
        given = msgspec.json.decode(data, type=_Refusal).error
    except msgspec.MsgspecError:
        return RequestError(f"a shard answered {status}", status=status)
    return RequestError(given.message, status=status, param=given.param, code=given.code)
