"""Writes to collections: create, add, delete, swap, rebuilds on request or when outdated."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
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
    SwapBody,
    UpsertBody,
    require_dimensions,
    require_fit,
    rows_of,
)

_log = logging.getLogger("ppd_router.pool")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FOLDER = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MAX_DIMENSIONS = 16_384
_RETRY_S = 60.0  # pause after a failed rebuild
MAX_WRITES = 64  # that wait or run: each has its rows in memory
_Result = TypeVar("_Result")


class Writes:
    """The writes of a pool.

    Args:
        config: of the pool.
        collections: by name; created ones are added.
        embeddings: for rows without a vector; None: such rows are refused.
        metrics: of the pool.
        warm: is called with every new target before it is searched.
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
        self._retry_at_s: dict[str, float] = {}
        self._creating = asyncio.Lock()
        # One thread for all rebuilds: each thread keeps the buffers of its rebuilds.
        self._builder = ThreadPoolExecutor(1, "rebuild")
        # Writers wait for each other. They must not occupy the threads of searches.
        self._writer = ThreadPoolExecutor(2, "write")
        self._waiting = 0

    async def close(self) -> None:
        """Wait for rebuilds and writes in progress, and stop the threads.

        Killing the process instead loses no rows, only the rebuild.
        """
        if self._rebuilds:
            _log.info("stopping when these are built anew: %s", ", ".join(self._rebuilds))
        await asyncio.gather(*self._rebuilds.values(), return_exceptions=True)
        self._builder.shutdown()
        self._writer.shutdown()

    async def create(self, name: str, body: CreateBody) -> tuple[Collection, bool]:
        """Return the collection of a name, and whether this call has created it.

        Args:
            name: of the collection.
            body: of the request.

        Raises:
            RequestError: the name or a field is invalid, or the collection exists with others.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{name!r} is no name: letters, digits, _, - and ., 64 at most", param="name"
            )
        if body.metric is Metric.IP:
            raise RequestError(
                "a collection for inner products needs the length of its longest row: build it "
                "with ppd-pool build",
                param="metric",
            )
        dimensions = body.dimensions
        if dimensions is None:
            sample = await self.embedded(["how many dimensions?"], Stage.DECODE)
            dimensions = sample.shape[1]
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise RequestError(f"dimensions must be 1 to {_MAX_DIMENSIONS}", param="dimensions")
        async with self._creating:
            if (existing := self._collections.get(name)) is not None:
                space = existing.space
                if (space.dimensions, space.metric) != (dimensions, body.metric):
                    raise RequestError(
                        f"there is a collection {name!r} with {space.dimensions} dimensions and "
                        f"metric {space.metric}",
                        status=409,
                        param="name",
                    )
                for field in body.indexed:
                    await self._write(existing.payloads.index, field)
                return existing, False
            folder = Path(self._config.data) / name
            space = Space.plain(dimensions, body.metric)
            await asyncio.to_thread(create_collection, folder, space, body.indexed)
            created = await asyncio.to_thread(Collection, folder, self._warm)
            self._collections[name] = created
            return created, True

    async def upsert(self, collection: Collection, body: UpsertBody) -> int:
        """Write rows, and return their number.

        Args:
            collection: that is written to.
            body: of the request.

        Raises:
            RequestError: a row is invalid. None is written then.
        """
        points = body.points
        if not 0 < len(points) <= MAX_POINTS:
            raise RequestError(f"a request has 1 to {MAX_POINTS} points, this one {len(points)}")
        if len({point.id for point in points}) < len(points):
            raise RequestError("an id comes twice", param="points")
        rows = await self._vectors(points)
        require_fit(rows, collection.space, "points")
        payloads = [Payload(point.id, point.text, point.metadata) for point in points]
        await self._write(collection.upsert, payloads, rows)
        self._count_written(collection, "upsert", len(points))
        return len(points)

    async def delete(self, collection: Collection, body: DeleteBody) -> int:
        """Delete rows, and return their number.

        Args:
            collection: that is written to.
            body: of the request.

        Raises:
            RequestError: neither ids nor a filter are given, or both.
        """
        row_filter = Filter.parse(body.filter)
        if (body.ids is None) is (row_filter is None):
            raise RequestError("give one of ids and filter; an empty filter is none")
        what = body.ids if row_filter is None else row_filter
        assert what is not None
        deleted = await self._write(collection.delete, what)
        self._count_written(collection, "delete", deleted)
        return deleted

    async def _write(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Run ``work`` in a writer's thread.

        Raises:
            Overloaded: too many writes wait.
        """
        if self._waiting >= MAX_WRITES:
            raise Overloaded(
                f"{self._waiting} writes are waiting", retry_after_s=1.0, code="queue_full"
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writer, work, *args)
        finally:
            self._waiting -= 1

    async def rebuild(self, collection: Collection) -> None:
        """Rebuild a collection's index with all cores.

        Raises:
            IndexFileError: the index cannot be built; the old one remains.
        """
        await self._run_rebuild(collection, self._config.cores)
        self._metrics.writes.labels(collection.name, "rebuild").inc()

    async def swap(self, collection: Collection, body: SwapBody) -> None:
        """Replace a collection by one that was built offline, whose folder is then removed.

        Raises:
            RequestError: the folder has an invalid name, is served itself, or does not fit.
            IndexFileError: the folder holds no collection or a damaged one, or the disk is full.
        """
        name = body.folder
        if not _FOLDER.fullmatch(name):
            raise RequestError(f"{name!r} is no folder of the pool's data folder", param="folder")
        if name in self._collections:
            raise RequestError(
                f"{name!r} is served itself; build into a folder whose name begins with a dot",
                status=409,
                param="folder",
            )
        folder = Path(self._config.data) / name
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._builder, collection.swap, folder)
        self._metrics.writes.labels(collection.name, "swap").inc()
        try:
            await asyncio.to_thread(shutil.rmtree, folder)
        except OSError as error:
            _log.warning("%s: swapped, but %s cannot be removed: %s", collection.name, name, error)

    async def embedded(self, texts: Sequence[str], stage: Stage) -> Rows:
        """Return a vector for each text, (texts, dimensions) float32.

        Args:
            texts: one or more.
            stage: of the search that waits for the vectors; decode for writes.

        Raises:
            RequestError: the pool has no embedding model.
            WorkerError: the embedding server does not respond.
        """
        if self._embeddings is None:
            raise RequestError('texts need embeddings_url; sentence_model = "" turned its own off')
        return await self._embeddings.embed(texts, stage)

    async def _vectors(self, points: Sequence[Point]) -> Rows:
        """Return the points' vectors: as given, or those of their texts."""
        given = [point.vector for point in points if point.vector is not None]
        if len(given) == len(points):
            return rows_of(given, "points")
        texts: list[str] = []
        for point in points:
            if point.vector is None:
                if not point.text:
                    raise RequestError(f"{point.id!r} has neither vector nor text", param="points")
                texts.append(point.text)
        embedded = await self.embedded(texts, Stage.DECODE)  # searches have a higher priority
        rows = np.empty((len(points), embedded.shape[1]), np.float32)
        has_vector = np.array([point.vector is not None for point in points])
        rows[~has_vector] = embedded
        if given:
            vectors = rows_of(given, "points")
            require_dimensions(vectors, embedded.shape[1], "points")
            rows[has_vector] = vectors
        return rows

    def _count_written(self, collection: Collection, kind: str, rows: int) -> None:
        self._metrics.writes.labels(collection.name, kind).inc(rows)
        share, name = self._config.rebuild_share, collection.name
        allowed = name not in self._rebuilds and time.monotonic() >= self._retry_at_s.get(name, 0.0)
        if share and allowed and collection.outdated(share):
            task = asyncio.get_running_loop().create_task(self._rebuild_outdated(collection))
            self._rebuilds[name] = task
            task.add_done_callback(lambda _: self._rebuilds.pop(name))

    async def _run_rebuild(self, collection: Collection, threads: int) -> None:
        loop = asyncio.get_running_loop()
        finder = Finder.AUTO if self._config.device is Device.CUDA else Finder.FAISS
        await loop.run_in_executor(self._builder, collection.rebuild, threads, finder)

    async def _rebuild_outdated(self, collection: Collection) -> None:
        """Rebuild an index with half of the cores; searches use the others."""
        try:
            await self._run_rebuild(collection, max(1, self._config.cores // 2))
        except Exception as error:  # noqa: BLE001 - a task ends here: logged, retried later
            self._retry_at_s[collection.name] = time.monotonic() + _RETRY_S
            trace = None if isinstance(error, PpdError) else error
            _log.error(
                "%s: its index could not be built anew: %s", collection.name, error, exc_info=trace
            )
        else:
            self._metrics.writes.labels(collection.name, "rebuild").inc()
            _log.info("%s: built anew, %d rows", collection.name, collection.count)
