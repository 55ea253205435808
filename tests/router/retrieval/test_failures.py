"""Searches that fail, are too late, or are cancelled by the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from eval.fake_worker.state import MODEL
from router.config.retrieval import RetrievalConfig

from ..conftest import Client, Cluster
from .chats import OPTIONS, Engines, sent
from .fake_pool import FakePool


async def _garbage(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"results": [{"hits": "many"}]})


async def _failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such collection"}}, status=404)


async def _dropping(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _hanging(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (_garbage, "its answer is malformed"),
        (_failing, "404"),
        (_dropping, "retrieval failed"),
        (_hanging, "too late: over 20 ms"),
    ],
)
async def test_a_failed_search_is_handled_as_the_options_say(
    cluster: Cluster, engines: Engines, pool: FakePool, script: Any, problem: str
) -> None:
    pool.script = script
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=10.0)
    async with cluster(*engines, retrieval=config) as client:
        without = await client.chat("about cats", retrieval=OPTIONS)
        assert without.status == 200
        assert sent(engines[1]) == ["about cats"]
        report = without.json["retrieval"]
        assert report["status"] == "failed"
        assert problem in report["error"]
        refused = await client.chat("about cats", retrieval={**OPTIONS, "on_failure": "fail"})
        assert refused.status == 503
        assert refused.json["error"]["code"] == "retrieval_failed"
        pool.script = None
        retried = await client.chat("about cats", retrieval=OPTIONS)
        assert retried.json["retrieval"]["status"] == "ok", "a failure is not stored"
        assert await client.metric("ppd_admission_waiting") == 0


async def test_without_a_pool_requests_are_served_without_passages(
    cluster: Cluster, engines: Engines
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url="http://127.0.0.1:9")) as client:
        reply = await client.chat("about cats", retrieval=OPTIONS)
        assert reply.status == 200
        assert reply.json["retrieval"]["status"] == "failed"


async def test_the_deadline_follows_the_ttft_target(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=800.0, max_ms=600.0)
    async with cluster(*engines, retrieval=config) as client:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "retrieval": OPTIONS,
        }
        path = "/v1/chat/completions"
        for headers in ({}, {"X-SLO-TTFT-MS": "250"}, {"X-SLO-TTFT-MS": "1"}):
            body["messages"] = [{"role": "user", "content": f"hi {headers}"}]
            await client.post(path, body, headers)
        assert [search["timeout_ms"] for search in pool.searches] == [600.0, 250.0, 20.0]


async def test_a_degraded_search_is_reported(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    pool.degraded = True
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("about cats", retrieval=OPTIONS)
        assert reply.json["retrieval"]["status"] == "degraded"
        assert reply.json["retrieval"]["citations"]


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_client_that_disconnects_during_the_search_is_counted(
    cluster: Cluster, engines: Engines, pool: FakePool, samples: int
) -> None:
    pool.script = _hanging
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=60_000.0, max_ms=60_000.0)
    async with cluster(*engines, retrieval=config) as client:
        request = asyncio.create_task(client.chat("about cats", retrieval=OPTIONS, n=samples))
        await pool.arrived.wait()
        request.cancel()
        pool.script = None
        assert (await client.chat("about dogs", retrieval=OPTIONS)).status == 200
        while not await _finished(client, "disconnected"):
            pass  # each look is a round trip
        assert len(engines[1].bodies) == 1, "the other one was never sent"


async def _finished(client: Client, outcome: str) -> float:
    labels = {"endpoint": "/v1/chat/completions", "outcome": outcome}
    return await client.metric("ppd_finished_total", **labels)
