"""Workers and clients that fail, one cell of the fault table a test."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from eval.fake_worker.request import Request, Script
from tests.waiting import HANG_S

from ..conftest import Client, Cluster
from ..scripts import answering, ending_early, failing, hanging, resetting, streaming_forever
from .faulty import in_flight, workers


@pytest.mark.parametrize("route", ["remote", "local"])
@pytest.mark.parametrize("fault", [resetting, ending_early])
async def test_a_truncated_stream_ends_with_one_error_event(
    cluster: Cluster, fault: Script, route: str
) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        contents = ["hello"]
        if route == "local":
            await client.chat(*contents)
            contents += ["www", "and"]
        d.script = fault
        reply = await client.chat(*contents, stream=True)
        assert reply.route[0] == route
        assert [("error" in event) for event in reply.events].count(True) == 1
        assert reply.events[-1]["error"]["code"] == 502
        labels = {"endpoint": "/v1/chat/completions", "outcome": "truncated"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_decode_stream_is_not_held_back_by_a_hanging_prefill(cluster: Cluster) -> None:
    p, d = workers(hanging, answering())
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), HANG_S)
        assert reply.status == 200
        assert len(reply.events) == 3
        await asyncio.wait_for(p.hung_up.wait(), HANG_S)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "kind"), [(500, "InternalServerError"), (400, "invalid_request_error")]
)
async def test_a_failed_prefill_is_reported_and_ends_the_decode_leg(
    cluster: Cluster, stream: bool, status: int, kind: str
) -> None:
    p, d = workers(failing(status, "no prefill for you"), hanging)
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=stream), HANG_S)
        assert reply.status == status
        assert reply.json["error"]["message"] == "no prefill for you"
        assert reply.json["error"]["type"] == kind
        await asyncio.wait_for(d.hung_up.wait(), HANG_S)
        assert await client.metric("ppd_prefill_errors_total") == (status >= 500)


async def test_a_failed_decode_is_reported_and_ends_the_prefill_leg(cluster: Cluster) -> None:
    p, d = workers(hanging, failing(500, "no room"))
    async with cluster(p, d) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), HANG_S)
        assert (reply.status, reply.json["error"]["message"]) == (500, "no room")
        await asyncio.wait_for(p.hung_up.wait(), HANG_S)


async def hang_up(client: Client, body: dict[str, Any], when: asyncio.Event) -> None:
    """Send a request and close the connection once ``when`` is set."""
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(
            http.post(f"{client.url}/v1/chat/completions", json=body).__aenter__()
        )
        await asyncio.wait_for(when.wait(), HANG_S)
        if task.done():
            task.result().close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_early_reaches_both_legs(
    cluster: Cluster, stream: bool
) -> None:
    p, d = workers(hanging, hanging)
    async with cluster(p, d) as client:
        message = {"role": "user", "content": "hello"}
        both = asyncio.Event()

        async def both_arrived() -> None:
            await asyncio.gather(p.arrived.wait(), d.arrived.wait())
            both.set()

        watch = asyncio.create_task(both_arrived())
        await hang_up(client, {"model": "fake", "messages": [message], "stream": stream}, both)
        await watch
        await asyncio.wait_for(asyncio.gather(p.hung_up.wait(), d.hung_up.wait()), HANG_S)
        assert await in_flight(client, p, d) == 0
        labels = {"endpoint": "/v1/chat/completions", "outcome": "disconnected"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_client_that_hangs_up_in_mid_stream_reaches_the_decode_leg(
    cluster: Cluster,
) -> None:
    p, d = workers(answering(), streaming_forever)
    async with cluster(p, d) as client, aiohttp.ClientSession() as http:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
        }
        response = await http.post(f"{client.url}/v1/chat/completions", json=body)
        await response.content.readany()
        response.close()
        await asyncio.wait_for(d.hung_up.wait(), HANG_S)
        assert await in_flight(client, p, d) == 0


async def test_a_client_that_leaves_behind_the_end_was_served(cluster: Cluster) -> None:
    """Clients close at ``[DONE]``; the worker's connection may end a moment later."""

    async def open_ended(request: Request) -> None:
        await answering()(request)
        await asyncio.Event().wait()

    p, d = workers(answering(), open_ended)
    async with cluster(p, d) as client, aiohttp.ClientSession() as http:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
        }
        response = await http.post(f"{client.url}/v1/chat/completions", json=body)
        await response.content.readuntil(b"[DONE]\n\n")
        response.close()
        await asyncio.wait_for(d.hung_up.wait(), HANG_S)
        assert await in_flight(client, p, d) == 0
        labels = {"endpoint": "/v1/chat/completions", "outcome": "ok"}
        assert await client.metric("ppd_finished_total", **labels) == 1
