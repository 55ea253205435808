"""One shard of a collection: the selection among its replicas, and their health checks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

import aiohttp
import msgspec

from ppd.ann.space import Metric
from ppd.errors import Overloaded, RequestError, WorkerError

from .metrics import PoolMetrics

_log = logging.getLogger("ppd_router.pool")
_HEALTH_S = 0.5  # limit and interval of health checks
_RETRY_S = 1.0
_UNREACHABLE = (aiohttp.ClientError, TimeoutError)


class Hit(msgspec.Struct):
    """One hit of a shard's response; text and metadata only if they were requested."""

    id: str
    score: float
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, object] | msgspec.UnsetType | None = msgspec.UNSET


class Result(msgspec.Struct):
    """A shard's hits for one query."""

    hits: list[Hit]
    degraded: bool


class ShardResults(msgspec.Struct):
    """A shard's response: a result for each query, and the metric of the scores."""

    results: list[Result]
    metric: Metric


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

    async def search(self, path: str, body: bytes, within_s: float) -> ShardResults:
        """Search a replica, and the next one if it fails.

        Args:
            path: of the request.
            body: of the request.
            within_s: time for all replicas together. A replica that has not responded in its
                share of it gets a health check. If this fails, the next replica is searched.

        Raises:
            RequestError: a replica has refused the request as wrong; or, with status 404, no
                replica that responds has the collection.
            Overloaded: no replica has searched, and the queue of at least one is full.
            WorkerError: no replica responds.
        """
        is_full = False
        unknown: RequestError | None = None
        for url in self._by_load():
            self._in_flight[url] += 1
            response = asyncio.create_task(self._post(url, path, body))
            try:
                await asyncio.wait([response], timeout=within_s / len(self._in_flight))
                if not response.done() and not await self._is_healthy(url):
                    raise TimeoutError("no response, and its health check failed")
                status, data = await response
                if status == 200:
                    return msgspec.json.decode(data, type=ShardResults)
                if status == 429:  # no failure
                    is_full = True
                    continue
                if status == 404:  # no failure, and another replica may have the collection
                    unknown = _error_of(status, data)
                    continue
                if 400 <= status < 500:
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
        if is_full:
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


def _error_of(status: int, data: bytes) -> RequestError:
    try:
        refusal = msgspec.json.decode(data, type=_Refusal).error
    except msgspec.MsgspecError:
        return RequestError(f"a shard answered {status}", status=status)
    return RequestError(refusal.message, status=status, param=refusal.param, code=refusal.code)
