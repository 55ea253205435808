"""Workers that a file lists join and leave while requests are served."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eval.cluster import free_port
from eval.dialects import DONE
from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from router.config.options import RouterConfig
from router.server.run import running

from ..conftest import Client, Cluster
from ..fixtures import serving, until, workers
from ..scripts import answering, token

P, D = "http://127.0.0.1:1", "http://127.0.0.1:2"
SOON: dict[str, Any] = {"discovery_interval_s": 0.01}
_number = count()


def write(path: Path, text: str) -> str:
    """Replace the file at once."""
    other = path.with_name(f"new-{next(_number)}")
    other.write_text(text)
    other.replace(path)
    return str(path)


def listing(*engines: FakeWorker) -> str:
    roles: dict[str, list[str]] = {"prefill": [], "decode": []}
    for engine in engines:
        roles[engine.role].append(engine.url)
    return "".join(f"{role} = {urls}\n" for role, urls in roles.items())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "workers.toml"


async def shows(client: Client, *engines: FakeWorker) -> bool:
    return set(await client.workers()) == {engine.url for engine in engines}


async def test_a_router_with_only_a_file_waits_for_one_worker_of_each_role(file: Path) -> None:
    p, d = workers()
    absent = FakeWorker("decode", answering(), port=free_port())
    d.port = free_port()
    config = RouterConfig(port=free_port(), policy="full", workers_file=str(file), **SOON)
    started, done = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(config):
            started.set()
            await done.wait()

    async def waits_for_workers() -> bool:
        try:
            async with http.get(f"http://127.0.0.1:{config.port}/health") as answer:
                return answer.status == 503
        except aiohttp.ClientConnectionError:
            return False

    async with p.serving(), aiohttp.ClientSession() as http:
        write(file, listing(p, absent, d))
        router = asyncio.create_task(serve())
        await until(waits_for_workers)
        client = Client(f"http://127.0.0.1:{config.port}", http)
        reply = await client.post("/workers", {"url": P, "role": "prefill"})
        assert reply.status == 503, "announcements are not accepted"
        async with d.serving():
            await started.wait()
            assert await shows(client, p, d)
            assert (await client.chat("hello")).route == ("remote", "first_turn")
            done.set()
            await router


async def test_workers_join_and_leave_with_the_file(cluster: Cluster, file: Path) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering())
    async with serving(p, d, other):
        options = {"workers_file": write(file, listing(p, d)), **SOON}
        async with cluster(**options) as client:
            assert await shows(client, p, d)
            write(file, listing(p, other))
            await until(lambda: shows(client, p, other))
            assert (await client.chat("hello")).status == 200
            assert (len(other.bodies), len(d.bodies)) == (1, 0)


async def test_a_stream_on_a_worker_that_is_removed_is_completed(
    cluster: Cluster, file: Path
) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> None:
        request.send(token("first"))
        begun.set()
        await gate.wait()
        request.send(token("last") + DONE)

    p, d = workers(slow)
    other = FakeWorker("decode", answering())
    async with serving(p, d, other):
        options = {"workers_file": write(file, listing(p, d)), **SOON}
        async with cluster(**options) as client:
            request = asyncio.create_task(client.chat("hello", stream=True))
            await begun.wait()
            write(file, listing(p, other))

            async def drains() -> bool:
                shown = await client.workers()
                return other.url in shown and shown[d.url]["draining"]

            await until(drains)
            assert (await client.workers())[d.url]["in_flight"] == 1
            assert (await client.chat("another")).status == 200
            assert (len(d.bodies), len(other.bodies)) == (1, 1), "it gets no new work"
            gate.set()
            texts = [e["choices"][0]["delta"]["content"] for e in (await request).events]
            assert texts == ["first", "last"]
            await until(lambda: shows(client, p, other))


async def test_a_worker_that_is_listed_again_while_it_drains_is_resumed(
    cluster: Cluster, file: Path
) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    quick = answering(prompt=100, cached=96)

    async def script(request: Request) -> None:
        if "wait" in str(request.body["messages"]):
            begun.set()
            await gate.wait()
        await quick(request)

    p, d = workers(script)
    async with serving(p, d):
        options = {"workers_file": write(file, listing(p, d)), **SOON}
        async with cluster(**options) as client:
            await client.chat("hello")
            request = asyncio.create_task(client.chat("wait", stream=True))
            await begun.wait()
            write(file, listing(p))

            async def drains() -> bool:
                return bool((await client.workers())[d.url]["draining"])

            async def serves() -> bool:
                shown = (await client.workers())[d.url]
                return bool(shown["alive"] and not shown["draining"])

            await until(drains)
            write(file, listing(p, d))
            await until(serves)
            gate.set()
            assert (await request).status == 200
            reply = await client.chat("hello", "www", "and")
            assert reply.route == ("local", "policy_full"), "it is the same process"


async def test_a_malformed_file_changes_nothing_and_is_logged_once(
    cluster: Cluster, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering())
    async with serving(p, d, other):
        options = {"workers_file": write(file, listing(p, d)), **SOON}
        async with cluster(**options) as client:

            async def is_logged() -> bool:
                await client.workers()
                return "the workers stay" in caplog.text

            write(file, listing(p, other) + "prefil = []")
            await until(is_logged)
            for _ in range(20):
                assert await shows(client, p, d)
            write(file, listing(p, d, other))
            await until(lambda: shows(client, p, d, other))
    assert caplog.text.count("the workers stay") == 1
    assert "Object contains unknown field `prefil`" in caplog.text


async def test_workers_that_joined_in_other_ways_are_not_removed(
    cluster: Cluster, file: Path
) -> None:
    p, given = workers()
    added, announced, listed = (FakeWorker("decode", answering()) for _ in range(3))
    async with serving(added, announced, listed):
        options = {"workers_file": write(file, listing(listed)), "accept_workers": True, **SOON}
        async with cluster(p, given, **options) as client:
            await until(lambda: shows(client, p, given, listed))
            one = {"url": added.url, "role": "decode"}
            async with client.http.put(f"{client.url}/workers", json=one) as answer:
                assert answer.status == 200
            announcement = {"url": announced.url, "role": "decode", "boot_id": announced.boot_id}
            assert (await client.post("/workers", announcement)).status == 200
            everyone = (given, added, announced, listed)
            write(file, listing(*everyone))  # they have joined already
            write(file, f'decode = ["{D}"]')
            await until(lambda: shows(client, p, given, added, announced))
            assert not any(one["draining"] for one in (await client.workers()).values())


async def test_operators_can_drain_and_remove_listed_workers(cluster: Cluster, file: Path) -> None:
    p, d = workers()
    async with serving(p, d):
        options = {"workers_file": write(file, listing(p, d)), **SOON}
        async with cluster(**options) as client:
            one = f"{client.url}/workers/{d.url.removeprefix('http://')}"
            async with client.http.post(f"{one}/drain") as answer:
                assert answer.status == 200
            write(file, listing(p, d) + "# touched")
            for _ in range(20):
                assert (await client.workers())[d.url]["draining"], "an operator drained it"
            async with client.http.delete(one) as answer:
                assert answer.status == 200
            await until(lambda: shows(client, p, d))  # as long as the file lists it
