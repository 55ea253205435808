"""Fixtures: a pool with passages, and workers that answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from eval.fake_worker.worker import FakeWorker
from tests.apps import serving_app

from ..scripts import answering
from .chats import on_topic
from .fake_pool import FakePool
from .topics import vector_of


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    """A pool with passages for every topic."""
    async with FakePool(on_topic).serving() as pool:
        yield pool


@pytest.fixture
def engines() -> tuple[FakeWorker, FakeWorker]:
    """A prefill and a decode worker."""
    return FakeWorker("prefill", answering()), FakeWorker("decode", answering())


@asynccontextmanager
async def serving(
    path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> AsyncIterator[str]:
    """Serve one path, for any method; gives the URL of the server."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    async with serving_app(app) as url:
        yield url


@pytest.fixture
async def embeddings() -> AsyncIterator[str]:
    """The URL of a server of embeddings."""

    async def embed(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        rows = [{"index": i, "embedding": vector_of(one)} for i, one in enumerate(body["input"])]
        return web.json_response({"data": rows[::-1]})

    async with serving("/v1/embeddings", embed) as url:
        yield url
