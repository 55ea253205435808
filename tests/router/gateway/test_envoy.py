"""The endpoint picker behind a real Envoy."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from eval.fake_worker.worker import FakeWorker
from router.config.gateway import GatewayConfig

from ..conftest import Client, Cluster
from ..fixtures import CHAT, LATER, chat, until, workers
from ..scripts import failing, streaming_forever
from .real_envoy import BY_HEADER, BY_METADATA, envoy
from .test_picker import picker_port


@pytest.fixture(params=[BY_HEADER, BY_METADATA], ids=["header", "metadata"])
def behind(
    cluster: Cluster,
    table: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Any:
    """``async with behind(prefill, decode) as (Envoy's client, router's client)``."""

    @asynccontextmanager
    async def start(*engines: FakeWorker) -> AsyncIterator[tuple[Client, Client]]:
        caplog.set_level(logging.INFO, "ppd.router")
        options = {"policy": "ppd", "table": str(table), "gateway": GatewayConfig(port=0)}
        async with (
            cluster(*engines, **options) as client,
            envoy(picker_port(caplog), request.param, tmp_path) as url,
        ):
            yield Client(url, client.http), client

    return start


async def test_a_conversation_through_envoy(behind: Any) -> None:
    p, d = workers()
    async with behind(p, d) as (gateway, client):
        first = await gateway.chat("hello")
        assert (first.status, first.route[0]) == (200, "remote")
        second = await gateway.chat(*LATER)
        assert second.route == ("local", "table")
        assert second.json["usage"]["prompt_tokens"] == 100
        assert d.bodies[-1]["custom_params"]["do_local_prefill"] is True
        assert d.headers[0]["x-prefiller-host-port"] == f"127.0.0.1:{p.port}"
        assert "x-prefiller-host-port" not in d.headers[1]
        assert len(d.legs) == 2
        assert await client.metric("ppd_finished_total", endpoint=CHAT, outcome="ok") == 2


async def test_the_openai_client_streams_through_envoy(behind: Any) -> None:
    async with behind(*workers()) as (gateway, _):
        openai = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0)
        async with openai:
            messages: list[Any] = chat("hello")["messages"]
            stream = await openai.chat.completions.create(
                model="fake", messages=messages, stream=True
            )
            parts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert parts == ["w0", "w1", "w2"]
            models = await openai.models.list()
            assert [model.id for model in models.data] == ["fake"]


async def test_long_bodies_through_envoy(behind: Any) -> None:
    p, d = workers()
    text = "word " * 100_000
    async with behind(p, d) as (gateway, _):
        assert (await gateway.chat(text)).status == 200
        assert d.bodies[-1]["messages"][0]["content"] == text


async def test_errors_through_envoy(behind: Any) -> None:
    p, d = workers(failing(500, "out of order"))
    async with behind(p, d) as (gateway, _):
        refused = await gateway.post(CHAT, b"{")
        assert refused.status == 400
        assert "JSON" in refused.json["error"]["message"]
        failed = await gateway.chat("hello")
        assert (failed.status, failed.json["message"]) == (500, "out of order")


async def test_a_client_that_leaves_envoy_frees_what_it_held(behind: Any) -> None:
    p, d = workers(streaming_forever)
    async with behind(p, d) as (gateway, client):
        body = chat("hello", stream=True)
        async with client.http.post(gateway.url + CHAT, json=body) as response:
            assert b"one" in await response.content.readany()
            response.close()
        await d.hung_up.wait()

        async def freed() -> bool:
            gone = {"endpoint": CHAT, "outcome": "disconnected"}
            counted = await client.metric("ppd_finished_total", **gone)
            return bool(counted == 1 and not (await client.workers())[d.url]["in_flight"])

        await until(freed)
