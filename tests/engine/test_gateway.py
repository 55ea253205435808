"""Conversations through a real Envoy: the router picks, a sidecar starts transfers."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from router.config.gateway import GatewayConfig
from tests.apps import serving_app
from tests.router.gateway.real_envoy import BY_HEADER, envoy

from .conversation import Conversation, user_messages
from .test_table import cheap_local, routed, write_table
from .workers import Workers, plugin_state

_PREFILL = "x-prefiller-host-port"
_HOP_BY_HOP = ("host", "content-length", "transfer-encoding", "connection", _PREFILL)


class Sidecar:
    """Stands before a decode worker: sends what names a prefill worker to both."""

    def __init__(self, http: aiohttp.ClientSession, workers: Workers) -> None:
        self._http = http
        self._workers = workers
        self.prefilled = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = orjson.loads(await request.read())
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        prefilling = None
        async with AsyncExitStack() as stack:
            if (prefill := request.headers.get(_PREFILL)) is not None:
                self.prefilled += 1
                async with self._http.get(f"http://{prefill}/server_info") as info:
                    port = (await info.json())["disaggregation_bootstrap_port"]
                room = random.getrandbits(63)
                address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
                body |= {**address, "bootstrap_room": room}
                prefilling = asyncio.create_task(self._prefill(prefill, request.path, body))
            post = self._http.post(
                f"{self._workers.decode.url}{request.path}", json=body, headers=headers
            )
            answer = await stack.enter_async_context(post)
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
        if prefilling is not None:
            await prefilling
        return response

    async def _prefill(self, worker: str, path: str, body: dict[str, Any]) -> None:
        async with self._http.post(f"http://{worker}{path}", json=body) as answer:
            await answer.read()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.serve)
        async with serving_app(app) as url:
            yield int(url.rsplit(":", 1)[1])


async def test_conversations_through_envoy_have_the_ids_of_one_server(
    workers: Workers,
    http: aiohttp.ClientSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ppd.router")
    await workers.settle(http)
    assert workers.monolithic is not None
    before = (await plugin_state(http, workers.decode))["accepted"]
    sidecar = Sidecar(http, workers)
    table = write_table(tmp_path / "table.json", cheap_local, workers.model.name)
    async with sidecar.listening() as port:
        options = GatewayConfig(port=0, decode_port=port)
        async with routed(workers, table=str(table), gateway=options):
            (picker,) = re.findall(r"gateways: 127\.0\.0\.1:(\d+)", caplog.text)
            async with envoy(int(picker), BY_HEADER, tmp_path) as url:
                chats = [Conversation(http, url).send_all(user_messages(i, 4)) for i in range(3)]
                through_envoy = await asyncio.gather(*chats)
    for i, turns in enumerate(through_envoy):
        assert turns[0].route == "remote"
        alone = await Conversation(http, workers.monolithic.url).send_all(user_messages(i, 4))
        assert [turn.ids for turn in turns] == [turn.ids for turn in alone]
    # What is live corrects the table, so a later turn beside others may be remote.
    routes = [turn.route for turns in through_envoy for turn in turns]
    local = routes.count("local")
    assert local
    assert sidecar.prefilled == routes.count("remote")
    assert (await plugin_state(http, workers.decode))["accepted"] == before + local
    await workers.settle(http)
