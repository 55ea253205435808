"""Searches that fail, come late, or nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from eval.fake_worker.state import MODEL
from router.config.retrieval import RetrievalConfig

from ..conftest import Client, Cluster
from .chats import WISH, Engines, sent
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
    ("script", "named"),
    [
        (_garbage, "its answer makes no sense"),
        (_failing, "404"),
        (_dropping, "retrieval failed"),
        (_hanging, "too late: over 20 ms"),
    ],
)
async def test_a_failed_search_follows_the_wish(
    cluster: Cluster, engines: Engines, pool: FakePool, script: Any, named: str
) -> None:
    pool.script = script
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=10.0)
    async with cluster(*engines, retrieval=config) as client:
        without = await client.chat("about cats", retrieval=WISH)
        assert without.status == 200
        assert sent(engines[1]) == ["about cats"]
        told = without.json["retrieval"]
        assert told["status"] == "failed"
        assert named in told["error"]
        refused = await client.chat("about cats", retrieval={**WISH, "on_failure": "fail"})
        assert refused.status == 503
        assert refused.json["error"]["code"] == "retrieval_failed"
        pool.script = None
        well = await client.chat("about cats", retrieval=WISH)
        assert well.json["retrieval"]["status"] == "ok", "a failure is not remembered"
        assert await client.metric("ppd_admission_waiting") == 0


async def test_a_pool_that_is_not_there_costs_only_the_passages(
    cluster: Cluster, engines: Engines
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url="http://127.0.0.1:9")) as client:
        reply = await client.chat("about cats", retrieval=WISH)
        assert reply.status == 200
        assert reply.json["retrieval"]["status"] == "failed"


async def test_the_deadline_is_what_the_target_leaves(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=800.0, max_ms=600.0)
    async with cluster(*engines, retrieval=config) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "retrieval": WISH}
        path = "/v1/chat/completions"
        for headers in ({}, {"X-SLO-TTFT-MS": "250"}, {"X-SLO-TTFT-MS": "1"}):
            body["messages"] = [{"role": "user", "content": f"hi {headers}"}]
            await client.post(path, body, headers)
        assert [one["timeout_ms"] for one in pool.searches] == [600.0, 250.0, 20.0]


async def test_a_degraded_search_is_told(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    pool.degraded = True
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("about cats", retrieval=WISH)
        assert reply.json["retrieval"]["status"] == "degraded"
        assert reply.json["retrieval"]["citations"]


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_client_that_hangs_up_meanwhile_leaves_nothing(
    cluster: Cluster, engines: Engines, pool: FakePool, samples: int
) -> None:
    pool.script = _hanging
    config = RetrievalConfig(url=pool.url, ttft_budget_ms=60_000.0, max_ms=60_000.0)
    async with cluster(*engines, retrieval=config) as client:
        asking = asyncio.create_task(client.chat("about cats", retrieval=WISH, n=samples))
        await pool.arrived.wait()
        asking.cancel()
        pool.script = None
        assert (await client.chat("about dogs", retrieval=WISH)).status == 200
        while not await _finished(client, "disconnected"):
            pass  # asking takes its time
        assert len(engines[1].bodies) == 1, "the other one was never sent"


async def _finished(client: Client, outcome: str) -> float:
    labels = {"endpoint": "/v1/chat/completions", "outcome": outcome}
    return await client.metric("ppd_finished_total", **labels)
