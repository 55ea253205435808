"""A collection of random rows, and a pool over real sockets that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from ppd.ann.snapshot import Precision, Shape
from ppd.ann.space import Metric, Rows
from router.pool.build import BuildOptions
from router.pool.config import PoolConfig
from router.pool.serve import make_app
from tests.apps import serving_app

OPTIONS = BuildOptions(Metric.L2, Precision.FP32, Shape(degree=16, knn=32), threads=2)
COUNT, WIDTH = 1200, 24
ROWS: Rows = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def raw(
        self, path: str, body: bytes, kind: str = "application/json"
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = {"Content-Type": kind}
        async with self._session.post(self.url + path, data=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self.url + path) as response:
            return response.status, await response.text()

    async def put(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.put(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def search(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/collections/docs/search", body)

    async def ids(self, vector: Rows, **body: Any) -> list[str]:
        status, reply = await self.search(vector=vector.tolist(), **body)
        assert status == 200, reply
        return [hit["id"] for hit in reply["results"][0]["hits"]]


def config_for(folder: Path, **options: Any) -> PoolConfig:
    """Without deadlines that a busy machine could miss, and without a model from elsewhere."""
    usual: dict[str, Any] = {"default_timeout_ms": 60_000.0, "sentence_model": ""}
    return PoolConfig(data=str(folder), **usual | options)


@asynccontextmanager
async def running(config: PoolConfig) -> AsyncIterator[Client]:
    config.check()
    async with (
        aiohttp.ClientSession() as session,
        serving_app(make_app(config, session)) as url,
    ):
        yield Client(url, session)


def exact(queries: Rows, limit: int, allowed: Any = slice(None)) -> list[list[str]]:
    ids = np.arange(COUNT)[allowed]
    near = ((queries[:, None] - ROWS[ids][None]) ** 2).sum(2)
    return [[f"d{ids[j]}" for j in row[:limit]] for row in np.argsort(near, axis=1)]


@asynccontextmanager
async def embedding(
    vectors: Callable[[str], Rows], wrong: list[web.Response], gate: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """The URL of a server of ``/v1/embeddings`` that answers in any order.

    Args:
        wrong: answers that it gives first.
        gate: it answers when this is open.
    """

    async def embed(request: web.Request) -> web.Response:
        if gate is not None:
            await gate.wait()
        if wrong:
            return wrong.pop()
        texts = (await request.json())["input"]
        rows = [{"index": i, "embedding": vectors(t).tolist()} for i, t in enumerate(texts)]
        return web.json_response({"data": rows[::-1]})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    async with serving_app(app) as url:
        yield url
