"""The client of the engine benches, on fake workers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import aiohttp
import pytest

from eval.engine.client import EngineClient, bootstrap_port_of
from eval.fake_worker.fault import Fault, FaultScript, fault_worker
from eval.fake_worker.worker import FakeWorker
from ppd.errors import WorkerError


@pytest.fixture
async def workers() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    prefill = fault_worker("prefill", "fake", FaultScript())
    decode = fault_worker("decode", "fake", FaultScript(pace_s=0.005))
    async with prefill.serving(), decode.serving():
        yield prefill, decode


@pytest.fixture
async def client(workers: tuple[FakeWorker, FakeWorker]) -> AsyncIterator[EngineClient]:
    prefill, decode = workers
    async with aiohttp.ClientSession() as http:
        port = await bootstrap_port_of(http, prefill.url)
        assert port == prefill.port
        yield EngineClient(http, prefill.url, decode.url, port, random.Random(0))


async def test_each_token_has_a_time(client: EngineClient) -> None:
    remote = await client.remote([1, 2, 3], 5)
    assert (len(remote.ids), len(remote.arrived_s), remote.cached_tokens) == (5, 5, 0)
    assert remote.ttft_ms > 0
    local = await client.local([1, 2, 3], 7, min_cached=2)
    assert (len(local.ids), len(local.arrived_s)) == (7, 7)
    assert local.cached_tokens > 0
    async with client.decoding([[1], [2]], max_tokens=2000) as replies:
        assert all(len(reply.arrived_s) >= 3 for reply in replies)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.FAILS, "answered 500: .*out of memory"),
        (Fault.REJECTS, "answered 400: .*no such thing"),
        (Fault.ERROR_FIRST, "error, by request"),
        (Fault.ERROR_LATER, "error, by request"),
    ],
)
async def test_errors_of_workers_are_raised(
    client: EngineClient,
    workers: tuple[FakeWorker, FakeWorker],
    fault: Fault,
    message: str,
) -> None:
    script = FaultScript()
    script.fault = fault
    workers[1].script = script
    with pytest.raises(WorkerError, match=message):
        await client.local([1], 3)
