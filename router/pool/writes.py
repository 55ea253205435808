"""Writing to collections: create, add, delete, rebuild, and an index that is outdated made anew."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ppd.ann.lanes import Target
from ppd.ann.neighbours import Finder
from ppd.ann.schedule import Stage
from ppd.ann.space import Metric, Rows, Space
from ppd.errors import Overloaded, PpdError, RequestError

from .build import create_collection
from .collection import Collection
from .config import Device, PoolConfig
from .embeddings import Embeddings
from .filters import Filter
from .metrics import PoolMetrics
from .payloads import Payload
from .requests import (
    MAX_POINTS,
    CreateBody,
    DeleteBody,
    Point,
    UpsertBody,
    require_dimensions,
    require_fit,
    rows_of,
)

_log = logging.getLogger("ppd_router.pool")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MAX_DIMENSIONS = 16_384
_REBUILD_REST_S = 60.0  # after one that failed
MAX_WRITES = 64  # that wait or run: each holds its rows
_Result = TypeVar("_Result")


class Writes:
    """
    Args:
        collections: by name; what is created is added.
        embeddings: of texts without a vector; None: none are taken.
        warm: makes an index ready to be searched.
    """

    def __init__(
        self,
        config: PoolConfig,
        collections: dict[str, Collection],
        embeddings: Embeddings | None,
        metrics: PoolMetrics,
        warm: Callable[[Target], None],
    ) -> None:
        self._config = config
        self._collections = collections
        self._embeddings = embeddings
        self._metrics = metrics
        self._warm = warm
        self._rebuilds: dict[str, asyncio.Task[None]] = {}
        self._rest_until_s: dict[str, float] = {}
        self._creating = asyncio.Lock()
        # One thread for all rebuilds: each would leave its buffers behind in another one.
        self._builder = ThreadPoolExecutor(1, "rebuild")
        # Writers wait for each other, and shall not take the threads that searches need.
        self._writer = ThreadPoolExecutor(2, "write")
        self._waiting = 0

    async def close(self) -> None:
        """Once what is being built is there: who cannot wait may kill the process, and loses
        nothing but the work."""
        if self._rebuilds:
            _log.info("stopping when these are built anew: %s", ", ".join(self._rebuilds))
        await asyncio.gather(*self._rebuilds.values(), return_exceptions=True)
        self._builder.shutdown()
        self._writer.shutdown()

    async def create(self, name: str, wanted: CreateBody) -> tuple[Collection, bool]:
        """The collection of that name, and whether it was made now.

        Raises:
            RequestError: what is wanted makes no sense, or is not what is there.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{name!r} is no name: letters, digits, _, - and ., 64 at most", param="name"
            )
        if wanted.metric is Metric.IP:
            raise RequestError(
                "a collection for inner products must know its longest row: build it with "
                "ppd-pool build",
                param="metric",
            )
        dimensions = wanted.dimensions
        if dimensions is None:
            one = await self.embedded(["how many dimensions?"], Stage.DECODE)
            dimensions = one.shape[1]
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise RequestError(f"dimensions must be 1 to {_MAX_DIMENSIONS}", param="dimensions")
        async with self._creating:
            if (there := self._collections.get(name)) is not None:
                space = there.space
                if (space.dimensions, space.metric) != (dimensions, wanted.metric):
                    raise RequestError(
                        f"there is a collection {name!r} with {space.dimensions} dimensions and "
                        f"metric {space.metric}",
                        status=409,
                        param="name",
                    )
                for field in wanted.indexed:
                    await self._write(there.payloads.index, field)
                return there, False
            folder = Path(self._config.data) / name
            space = Space.plain(dimensions, wanted.metric)
            await asyncio.to_thread(create_collection, folder, space, wanted.indexed)
            made = await asyncio.to_thread(Collection, folder, self._warm)
            self._collections[name] = made
            return made, True

    async def upsert(self, collection: Collection, body: UpsertBody) -> int:
        """How many rows were written.

        Raises:
            RequestError: a point makes no sense; then none is written.
        """
        points = body.points
        if not 0 < len(points) <= MAX_POINTS:
            raise RequestError(f"a request has 1 to {MAX_POINTS} points, this one {len(points)}")
        if len({one.id for one in points}) < len(points):
            raise RequestError("an id comes twice", param="points")
        rows = await self._vectors(points)
        require_fit(rows, collection.space, "points")
        payloads = [Payload(one.id, one.text, one.metadata) for one in points]
        await self._write(collection.upsert, payloads, rows)
        self._written(collection, "upsert", len(points))
        return len(points)

    async def delete(self, collection: Collection, body: DeleteBody) -> int:
        """How many rows were there.

        Raises:
            RequestError: neither ids nor a filter are given, or both.
        """
        wanted = Filter.parse(body.filter)
        if (body.ids is None) is (wanted is None):
            raise RequestError("give one of ids and filter; an empty filter is none")
        what = body.ids if wanted is None else wanted
        assert what is not None
        gone = await self._write(collection.delete, what)
        self._written(collection, "delete", gone)
        return gone

    async def _write(self, work: Callable[..., _Result], *given: Any) -> _Result:
        """
        Raises:
            Overloaded: as many writes wait as may.
        """
        if self._waiting >= MAX_WRITES:
            raise Overloaded(
                f"{self._waiting} writes are waiting", retry_after_s=1.0, code="queue_full"
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writer, work, *given)
        finally:
            self._waiting -= 1

    async def rebuild(self, collection: Collection) -> None:
        """
        Raises:
            IndexFileError: it cannot be built; the old one still serves.
        """
        await self._build_anew(collection, self._config.cores)
        self._metrics.writes.labels(collection.name, "rebuild").inc()

    async def embedded(self, texts: Sequence[str], stage: Stage) -> Rows:
        """
        Raises:
            RequestError: nobody embeds here.
            WorkerError: whoever embeds does not answer.
        """
        if self._embeddings is None:
            raise RequestError('texts need embeddings_url; sentence_model = "" turned its own off')
        return await self._embeddings.embed(texts, stage)

    async def _vectors(self, points: Sequence[Point]) -> Rows:
        """Those given, and of the other points those of their texts."""
        given = [one.vector for one in points if one.vector is not None]
        if len(given) == len(points):
            return rows_of(given, "points")
        texts: list[str] = []
        for one in points:
            if one.vector is None:
                if not one.text:
                    raise RequestError(f"{one.id!r} has neither vector nor text", param="points")
                texts.append(one.text)
        told = await self.embedded(texts, Stage.DECODE)  # after those that a user waits for
        rows = np.empty((len(points), told.shape[1]), np.float32)
        has = np.array([one.vector is not None for one in points])
        rows[~has] = told
        if given:
            listed = rows_of(given, "points")
            require_dimensions(listed, told.shape[1], "points")
            rows[has] = listed
        return rows

    def _written(self, collection: Collection, kind: str, rows: int) -> None:
        self._metrics.writes.labels(collection.name, kind).inc(rows)
        share, name = self._config.rebuild_share, collection.name
        may = name not in self._rebuilds and time.monotonic() >= self._rest_until_s.get(name, 0.0)
        if share and may and collection.outdated(share):
            task = asyncio.get_running_loop().create_task(self._renew(collection))
            self._rebuilds[name] = task
            task.add_done_callback(lambda _: self._rebuilds.pop(name))

    async def _build_anew(self, collection: Collection, threads: int) -> None:
        loop = asyncio.get_running_loop()
        finder = Finder.AUTO if self._config.device is Device.CUDA else Finder.FAISS
        await loop.run_in_executor(self._builder, collection.rebuild, threads, finder)

    async def _renew(self, collection: Collection) -> None:
        """With half of the cores: searches go on."""
        try:
            await self._build_anew(collection, max(1, self._config.cores // 2))
        except Exception as error:  # noqa: BLE001 - no memory, perhaps: not at once again
            self._rest_until_s[collection.name] = time.monotonic() + _REBUILD_REST_S
            told = None if isinstance(error, PpdError) else error
            _log.error(
                "%s: its index could not be built anew: %s", collection.name, error, exc_info=told
            )
        else:
            self._metrics.writes.labels(collection.name, "rebuild").inc()
            _log.info("%s: built anew, %d rows", collection.name, collection.count)
