"""Workers added, removed, drained and resumed while requests are served."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import aiohttp
import msgspec
import pytest

from eval.cluster import free_port
from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from ppd.errors import WorkerError
from router.config.options import RouterConfig
from router.peers import Peers
from router.server.run import running
from router.wire.access import is_loopback

from ..conftest import Client, Cluster
from ..fixtures import serving
from ..scripts import answering, token

SECRET = {"Authorization": "Bearer s3cret"}


async def operate(
    client: Client, method: str, path: str, body: Any = None, headers: Any = None
) -> tuple[int, Any]:
    url = f"{client.url}/workers{path}"
    async with client.http.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def state(client: Client, engine: FakeWorker) -> dict[str, Any]:
    _, known = await operate(client, "GET", "")
    found: dict[str, Any] = next(one for one in known if one["url"] == engine.url)
    return found


def ident(engine: FakeWorker) -> str:
    return engine.url.removeprefix("http://")


async def test_a_drained_worker_gets_nothing_new_and_its_conversations_move(
    cluster: Cluster,
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=100))
    other = FakeWorker("decode", answering())
    async with cluster(p, d, other) as client:
        await client.chat("hello " * 40)
        home, free = (d, other) if d.bodies else (other, d)
        assert (await client.chat("hello " * 40, "www", "on")).route == ("local", "policy_full")
        status, fields = await operate(client, "POST", f"/{ident(home)}/drain")
        assert (status, fields["draining"], fields["in_flight"]) == (200, True, 0)
        served = len(home.bodies)
        reply = await client.chat("hello " * 40, "www", "on", "www", "and on")
        assert reply.route == ("remote", "home_gone")
        assert len(home.bodies) == served
        await operate(client, "POST", f"/{ident(free)}/drain")
        assert (await client.chat("another")).status == 503
        await operate(client, "POST", f"/{ident(home)}/resume")
        assert (await client.chat("another")).status == 200


async def test_a_stream_outlives_drain_and_removal(cluster: Cluster) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def slowly(request: Request) -> None:
        request.send(token("one"))
        begun.set()
        await gate.wait()
        request.send(b"data: [DONE]\n\n")

    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", slowly)
    async with cluster(p, d) as client:
        asked = asyncio.create_task(client.chat("hello", stream=True))
        await begun.wait()
        await operate(client, "POST", f"/{ident(d)}/drain")
        status, fields = await operate(client, "DELETE", f"/{ident(d)}")
        assert (status, fields["in_flight"]) == (200, 1)
        gate.set()
        assert len((await asked).events) == 1


async def test_a_worker_is_added(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    late = FakeWorker("decode", answering())
    async with cluster(p, d) as client, late.serving():
        added = {"url": late.url + "/", "role": "decode"}
        status, fields = await operate(client, "PUT", "", added)
        assert (status, fields["id"]) == (200, ident(late))
        assert (await operate(client, "PUT", "", added))[0] == 200
        await operate(client, "DELETE", f"/{ident(d)}")
        assert (await client.chat("hello")).status == 200
        assert late.bodies


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"url": "http://x:1"}, 400, "role"),
        ({"url": "http://x:1", "role": "both"}, 400, "role"),
        ({"url": "x", "role": "decode"}, 400, "must be http"),
        ({"url": "http://127.0.0.1:1", "role": "decode"}, 409, "does not answer"),
        ({"url": "PREFILL", "role": "decode"}, 409, "known already, as a prefill worker"),
    ],
)
async def test_a_worker_that_cannot_be_added_is_answered_with_the_reason(
    cluster: Cluster, body: dict[str, str], status: int, named: str
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d) as client:
        given = {key: p.url if value == "PREFILL" else value for key, value in body.items()}
        answered, fields = await operate(client, "PUT", "", given)
        assert answered == status
        assert named in fields["error"]["message"]


async def test_only_operators_change_workers(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d, admin_token="s3cret") as client:
        for path, method, body in (
            (f"/{ident(d)}/drain", "POST", None),
            (f"/{ident(d)}", "DELETE", None),
            ("", "PUT", {"url": "http://x:1", "role": "decode"}),
        ):
            assert (await operate(client, method, path, body))[0] == 401
            wrong = {"Authorization": "Bearer s3cre"}
            assert (await operate(client, method, path, body, wrong))[0] == 401
        assert (await operate(client, "POST", f"/{ident(d)}/drain", headers=SECRET))[0] == 200
        status, fields = await operate(client, "POST", "/x:1/drain", headers=SECRET)
        assert status == 404
        assert ident(d) in fields["error"]["message"]


async def test_the_answer_names_the_process_that_was_not_reached() -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    away = f"http://127.0.0.1:{free_port()}"
    async with serving(p, d), aiohttp.ClientSession() as http:
        config = RouterConfig(port=0, policy="full", prefill=(p.url,), decode=(d.url,))
        async with running(config, peers=Peers(0, {1: away}, "secret")) as url:
            client = Client(url, http)
            status, fields = await operate(client, "POST", f"/{ident(d)}/drain")
            assert status == 502
            assert f"{away} could not be reached for POST" in fields["error"]["message"]
            assert (await state(client, d))["draining"]
            by_sibling = {"X-PPD-Sibling": "secret", "X-PPD-Passed-On": "10.1.2.3"}
            path = f"/{ident(d)}/resume"
            assert (await operate(client, "POST", path, headers=by_sibling))[0] == 200
            by_nobody = {**by_sibling, "X-PPD-Sibling": "a guess"}
            assert (await operate(client, "POST", path, headers=by_nobody))[0] == 502


async def test_a_change_that_missed_a_process_is_sent_again() -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    late = FakeWorker("decode", answering())
    port = free_port()
    async with serving(p, d, late), aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        config = RouterConfig(port=0, policy="full", prefill=(p.url,), decode=(d.url,))
        peers = Peers(0, {1: f"http://127.0.0.1:{port}"}, "secret")
        url = await stack.enter_async_context(running(config, peers=peers))
        one, added = Client(url, http), {"url": late.url, "role": "decode"}
        assert (await operate(one, "PUT", "", added))[0] == 502
        assert (await operate(one, "DELETE", f"/{ident(d)}"))[0] == 502
        config = msgspec.structs.replace(config, port=port)
        url = await stack.enter_async_context(running(config, peers=Peers(1, {}, "secret")))
        assert (await operate(one, "PUT", "", added))[0] == 200
        assert (await operate(one, "DELETE", f"/{ident(d)}"))[1]["id"] == ident(d)
        _, known = await operate(Client(url, http), "GET", "")
        assert {worker["url"] for worker in known} == {p.url, late.url}
        assert (await operate(one, "DELETE", f"/{ident(d)}"))[0] == 404


async def test_a_process_needs_a_worker_to_begin_with() -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    port = free_port()
    async with serving(p, d), aiohttp.ClientSession() as http:
        config = RouterConfig(port=port, policy="full", prefill=(p.url,), decode=(d.url,))
        async with running(config, peers=Peers(0, {}, "secret")) as url:
            for engine in (p, d):
                await operate(Client(url, http), "DELETE", f"/{ident(engine)}")
            config = msgspec.structs.replace(config, port=0)
            second = running(config, peers=Peers(1, {0: url}, "secret"))
            with pytest.raises(WorkerError, match="operators have removed every worker"):
                await second.__aenter__()


@pytest.mark.parametrize(
    ("address", "ours"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.5", False), (None, False), ("", False)],
)
def test_whose_address_is_the_routers_own(address: str | None, ours: bool) -> None:
    assert is_loopback(address) is ours


# CPython's event loop may drop what it accepts while its server closes (python/cpython#109564): the
# fake worker's does, now and then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_rolling_restart_fails_nobody(cluster: Cluster) -> None:
    """Drain, wait, stop, start, one worker after the other of each role, under steady load."""

    arrived: defaultdict[object, asyncio.Event] = defaultdict(asyncio.Event)  # by room

    async def prefilling(request: Request) -> None:
        arrived[request.body["bootstrap_room"]].set()
        await answering()(request)

    async def decoding(request: Request) -> None:
        """Answer when the KV can have come: the prefill worker has the request."""
        if (room := request.body.get("bootstrap_room")) is not None:
            await arrived[room].wait()
        await answering()(request)

    scripts = {"prefill": prefilling, "decode": decoding}
    workers = [FakeWorker(role, script) for role, script in scripts.items() for _ in range(2)]
    running = [AsyncExitStack() for _ in workers]
    for engine, stack in zip(workers, running, strict=True):
        await stack.enter_async_context(engine.serving())
    statuses: asyncio.Queue[int] = asyncio.Queue()
    names = count()
    async with cluster(*workers) as client:

        async def ask() -> None:
            while True:
                said = [f"conversation {next(names)} " * 20]
                for _ in range(4):
                    statuses.put_nowait((await client.chat(*said, stream=True)).status)
                    said += ["www", "go on"]

        async def some_are_served() -> None:
            for _ in range(50):
                assert await statuses.get() == 200

        askers = [asyncio.create_task(ask()) for _ in range(8)]
        for engine, stack in zip(workers, running, strict=True):
            await some_are_served()
            drained = False
            while not drained:
                _, fields = await operate(client, "POST", f"/{ident(engine)}/drain")
                drained = fields["in_flight"] == 0
            await stack.aclose()
            engine.boot_id = "another process"
            while (await state(client, engine))["alive"]:  # a real one takes longer to start
                await some_are_served()
            engine.legs.clear()
            await stack.enter_async_context(engine.serving())
            while not engine.legs:  # the router finds it again by itself
                await some_are_served()
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
    for stack in running:
        await stack.aclose()
