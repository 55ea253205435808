"""What a request leaves behind for Python's garbage collector: nothing of the router's."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker

from ..conftest import CHAT_BODY, Client, Cluster
from ..scripts import answering


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What would be collected is kept in ``gc.garbage`` instead, when it is asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_no_cycles(cluster: Cluster, stream: bool) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    async with cluster(p, d) as client:
        await client.chat("hello", stream=stream)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for i in range(5):
            assert (await client.chat(f"a{i}", stream=stream)).route[0] == "remote"
            assert (await client.chat(f"a{i}", "www", "b", stream=stream)).route[0] == "local"
        gc.collect()
        left = Counter(type(one) for one in gc.garbage)
        assert not [kind for kind in left if kind.__module__.startswith("router.")]


@pytest.mark.usefixtures("uncollected")
async def test_a_request_that_finds_no_worker_leaves_none(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d, probe_interval_s=1000.0) as client:
        async with client.http.get(f"{client.url}/workers") as answer:
            (drained,) = [one["id"] for one in await answer.json() if one["role"] == "prefill"]
        await client.http.post(f"{client.url}/workers/{drained}/drain")
        assert (await client.chat("x")).status == 503
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for i in range(5):
            assert (await client.chat(f"a{i}")).status == 503
        gc.collect()
        left = Counter(type(one) for one in gc.garbage)
        assert not [kind for kind in left if kind.__module__.startswith(("router.", "ppd."))]


@pytest.mark.usefixtures("uncollected")
async def test_connections_that_end_leave_none(cluster: Cluster) -> None:
    """Of clients, whom they ask for, and to workers."""

    async def once(client: Client, i: int) -> None:
        close = {"Connection": "close"}
        body = {**CHAT_BODY, "messages": [{"role": "user", "content": f"b{i}"}]}
        assert (await client.post("/v1/chat/completions", body, close)).status == 200
        async with client.http.get(f"{client.url}/health", headers=close) as answer:
            assert answer.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"nonsense\r\n\r\n")
        await reader.read()
        writer.close()

    async def closing(request: Request) -> None:
        await answering(cached=96)(request)
        request.end()
        request.close()

    p, d = FakeWorker("prefill", closing), FakeWorker("decode", closing)
    async with cluster(p, d) as client:
        await once(client, 0)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for i in range(1, 6):
            await once(client, i)
        gc.collect()
        left = Counter(type(one) for one in gc.garbage)
        wire = ("router.wire.", "httptools.")
        assert not [kind for kind in left if kind.__module__.startswith(wire)]
