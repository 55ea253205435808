"""Workers that announce themselves, leave, fall silent, or must be refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eval.cluster import free_port
from eval.fake_worker.worker import FakeWorker
from ppd.announcement import PATH, Announcement
from ppd.contract import Role
from ppd.errors import WorkerError
from router.admin.app import answer_errors
from router.config.options import RouterConfig
from router.peers import PASSED_ON, PEER_HEADER, Peers
from router.server.run import running
from router.workers.membership import Membership
from router.workers.registry import WorkerRegistry

from ..conftest import Client, Cluster, Reply
from ..fixtures import until, workers
from ..scripts import answering

TOKEN = {"Authorization": "Bearer s3cret"}


def announcement_fields(engine: FakeWorker, **fields: Any) -> dict[str, Any]:
    load = {"running": 3, "kv_used_tokens": 100, "kv_total_tokens": 1000}
    return {
        "url": engine.url,
        "role": engine.role,
        "boot_id": engine.boot_id,
        "load": load,
        **fields,
    }


async def announce(
    client: Client, engine: FakeWorker, headers: Any = TOKEN, **fields: Any
) -> Reply:
    return await client.post(PATH, announcement_fields(engine, **fields), headers)


async def listed(client: Client) -> dict[str, Any]:
    async with client.http.get(client.url + PATH) as answer:
        return {worker["url"]: worker for worker in await answer.json()}


OPEN: dict[str, Any] = {"accept_workers": True, "worker_token": "s3cret"}


@pytest.mark.parametrize("separate_admin_port", [False, True])
async def test_a_router_without_workers_waits_for_announcements(separate_admin_port: bool) -> None:
    p, d = workers()
    admin_port = free_port() if separate_admin_port else None
    config = RouterConfig(port=free_port(), policy="full", admin_port=admin_port, **OPEN)
    url = f"http://127.0.0.1:{config.port}"
    done = asyncio.Event()

    async def serve() -> None:
        async with running(config):
            await done.wait()

    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        router = asyncio.create_task(serve())
        client = Client(url, http)
        inner = Client(f"http://127.0.0.1:{admin_port}", http) if separate_admin_port else client
        await until(lambda: answers(client, 503))
        for one in (client, inner):
            assert (await one.http.get(f"{one.url}/live")).status == 200
        assert (await announce(inner, p)).status == 200
        assert (await client.chat("hello")).status == 503, "there is no decode worker yet"
        assert (await announce(client, d)).status == (503 if separate_admin_port else 200)
        assert (await announce(inner, d)).status == 200
        await until(lambda: answers(client, 200))
        assert (await client.chat("hello")).route == ("remote", "first_turn")
        done.set()
        await router


@pytest.mark.parametrize("announced", [False, True])
async def test_a_flushed_cache_has_no_sessions_after_the_next_heartbeat(
    cluster: Cluster, announced: bool
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering(prompt=100, cached=96))
    async with cluster(p, d, **OPEN) as client, other.serving():
        if announced:
            assert (await announce(client, other, flushes=3)).status == 200
            await client.post(f"/workers/{d.url.removeprefix('http://')}/drain", {})
        home = other if announced else d
        assert (await announce(client, home, flushes=3)).status == 200
        assert (await client.chat("a")).route == ("remote", "first_turn")
        assert (await announce(client, home, flushes=3)).status == 200
        assert (await client.chat("a", "www", "b")).route == ("local", "policy_full")
        before = len(home.bodies)
        assert (await announce(client, home, flushes=4)).status == 200
        third = await client.chat("a", "www", "b", "www", "c")
        assert third.route == ("remote", "home_gone")
        assert len(home.bodies) == before + 1, "no request was sent to it"
        fourth = await client.chat("a", "www", "b", "www", "c", "www", "d")
        assert fourth.route == ("local", "policy_full")
        assert (await announce(client, home)).status == 200  # an older plugin reports no flushes
        fifth = await client.chat("a", "www", "b", "www", "c", "www", "d", "www", "e")
        assert fifth.route == ("local", "policy_full")


async def test_announced_loads_are_those_of_the_ranks(cluster: Cluster) -> None:
    """And a heartbeat without them is no load of a server with ranks."""
    other = FakeWorker("decode", answering())
    other.dp_size, other.free_tokens = 2, 7000
    loads = [
        {"running": 3 + rank, "kv_used_tokens": 1000 * rank, "kv_total_tokens": 10_000}
        for rank in (0, 1)
    ]
    async with cluster(*workers(), **OPEN) as client, other.serving():

        async def has(expected: list[tuple[int, int]]) -> bool:
            async with client.http.get(f"{client.url}/dashboard/state") as answer:
                known = (await answer.json())["workers"]
            ranks = [one for one in known if one["url"] == other.url]
            return [(one["running"], one["free_tokens"]) for one in ranks] == expected

        assert (await announce(client, other, loads=loads)).status == 200
        await until(lambda: has([(3, 10_000), (4, 9_000)]))
        assert (await announce(client, other)).status == 200
        await until(lambda: has([(0, 7000)] * 2))


async def answers(client: Client, status: int) -> bool:
    try:
        async with client.http.get(client.url + "/health") as answer:
            return answer.status == status
    except aiohttp.ClientConnectionError:
        return False


async def test_a_worker_that_joins_gets_work_and_one_that_leaves_gets_none(
    cluster: Cluster,
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering(prompt=100, cached=96))
    async with cluster(p, d, **OPEN) as client, other.serving():
        assert (await announce(client, other)).json == {"workers": 3}
        assert (await announce(client, other)).json == {"workers": 3}, "it has joined already"
        shown = (await listed(client))[other.url]
        assert shown["announced"]["load"]["running"] == 3
        await asyncio.gather(*(client.chat(f"{i} opens", stream=True) for i in range(4)))
        assert other.bodies, "the least busy worker gets the next request"
        assert (await client.chat("0 opens", "w0w1w2", "and", stream=True)).route[0] == "local"
        await announce(client, other, leaving=True)
        assert other.url not in await listed(client)
        before = len(other.bodies)
        for i in range(4):
            reply = await client.chat(f"{i} opens", "w0w1w2", "more", stream=True)
            assert reply.status == 200
        assert len(other.bodies) == before
        # The same process joins again, and still has its KV.
        await announce(client, other)
        routes = [
            (await client.chat(f"{i} opens", "w0w1w2", "again", stream=True)).route
            for i in range(4)
        ]
        assert {route for route, _ in routes} == {"local"}


async def test_another_process_at_its_url_has_no_kv(cluster: Cluster) -> None:
    p, d = workers()
    async with cluster(p, d, **OPEN) as client:
        await client.chat("hello")
        assert (await client.chat("hello", "www", "and")).route == ("local", "policy_full")
        d.boot_id = "2"
        await announce(client, d)
        assert (await client.chat("hello", "www", "so")).route == ("remote", "home_gone")


async def test_a_late_leave_of_an_earlier_process_is_ignored(cluster: Cluster) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering(), boot_id="new")
    async with cluster(p, d, **OPEN) as client, other.serving():
        await announce(client, other)
        await announce(client, other, boot_id="old", leaving=True)
        assert other.url in await listed(client)


async def test_a_process_joins_once(cluster: Cluster) -> None:
    p, d = workers()
    d.boot_id = "mine"
    async with cluster(p, d, **OPEN) as client:
        reply = await announce(client, d, url=d.url.replace("127.0.0.1", "localhost"))
        assert reply.status == 409
        assert f"is the process that is known as {d.url}" in reply.json["error"]["message"]


async def test_a_worker_that_changes_its_role_leaves(
    cluster: Cluster,
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering(), boot_id="7")
    async with cluster(p, d, **OPEN) as client, other.serving():
        await announce(client, other)
        other.role, other.boot_id = "prefill", "8"
        reply = await announce(client, other)
        assert (reply.status, other.url in await listed(client)) == (409, False)
        assert (await announce(client, other)).status == 200, "it may join in its new role"
        assert (await listed(client))[other.url]["role"] == "prefill"
        assert await client.metric("ppd_worker_alive", role="decode", worker=other.url) == 0


@pytest.mark.parametrize(
    ("headers", "change", "status", "named"),
    [
        ({}, {}, 401, "worker token"),
        ({"Authorization": "Bearer other"}, {}, 401, "worker token"),
        (TOKEN, {"url": "ftp://there"}, 409, "must be http://HOST:PORT"),
        (TOKEN, {"role": "chef"}, 400, "Invalid enum value 'chef' - at `$.role`"),
        (TOKEN, {"boot_id": 7}, 400, "$.boot_id"),
        (TOKEN, {"load": {"running": -1}}, 400, "$.load.running"),
        (TOKEN, {"role": "replica"}, 409, "uses no replica workers, only prefill, decode"),
        (TOKEN, {"role": "prefill"}, 409, "runs with --disaggregation-mode decode"),
        (TOKEN, {"url": "http://127.0.0.1:9"}, 409, "does not answer the router"),
    ],
)
async def test_a_worker_that_cannot_join_gets_the_reason(
    cluster: Cluster, headers: dict[str, str], change: dict[str, Any], status: int, named: str
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering())
    async with cluster(p, d, **OPEN) as client, other.serving():
        reply = await announce(client, other, headers, **change)
        assert (reply.status, len(await listed(client))) == (status, 2), reply.body
        assert named in reply.json["error"]["message"]


async def test_a_worker_with_another_model_is_refused(cluster: Cluster) -> None:
    other = FakeWorker("decode", answering(), model="other")
    async with cluster(*workers(), **OPEN) as client, other.serving():
        reply = await announce(client, other)
        assert reply.status == 409
        assert "workers serve different models: other on" in reply.json["error"]["message"]


async def test_without_accept_workers_announcements_are_refused(cluster: Cluster) -> None:
    p, d = workers()
    async with cluster(p, d) as client:
        reply = await announce(client, d)
        assert reply.status == 405, "GET shows the workers"


async def test_a_drain_holds_if_the_process_falls_silent_and_joins_again() -> None:
    now_s = 0.0
    worker = FakeWorker("decode", answering())
    async with worker.serving(), aiohttp.ClientSession() as control:
        registry = WorkerRegistry(control)
        members = members_of(registry, token="", budget_s=10.0, clock=lambda: now_s)
        await members.handle(announcement_of(worker))
        registry.servers[0].draining = True
        worker.ready = False
        registry.servers[0].alive = False
        with pytest.raises(WorkerError):
            await members.handle(announcement_of(worker))
        assert registry.servers == []
        worker.ready = True
        await members.handle(announcement_of(worker))
        assert registry.servers[0].draining
        now_s = 11.0
        members.drop_silent()
        assert registry.servers == []
        await members.handle(announcement_of(worker))
        assert registry.servers[0].draining
        now_s = 22.0
        members.drop_silent()
        worker.boot_id = "another process"
        await members.handle(announcement_of(worker))
        assert not registry.servers[0].draining


async def test_malformed_json_is_refused(cluster: Cluster) -> None:
    async with cluster(*workers(), **OPEN) as client:
        reply = await client.post(PATH, b"\xff{", TOKEN)
        assert reply.status == 400
        assert "no announcement" in reply.json["error"]["message"]


async def test_silent_announced_workers_are_dropped_and_no_others() -> None:
    now_s = 0.0
    announced = FakeWorker("decode", answering())
    given = FakeWorker("prefill", answering())
    async with (
        announced.serving(),
        given.serving(),
        aiohttp.ClientSession() as control,
    ):
        registry = WorkerRegistry(control)
        members = Membership(
            registry,
            roles=(Role.PREFILL, Role.DECODE),
            token="",
            budget_s=10.0,
            clock=lambda: now_s,
        )
        await members.handle(announcement_of(announced))
        await members.handle(announcement_of(given))
        registry.servers[1].announced_at_s = None  # as one that was given at start
        now_s = 9.0
        members.drop_silent()
        assert len(registry.workers) == 2
        await members.handle(announcement_of(announced))
        now_s = 18.9
        members.drop_silent()
        assert len(registry.workers) == 2
        now_s = 19.1
        members.drop_silent()
        assert [worker.url for worker in registry.workers] == [given.url]


def announcement_of(engine: FakeWorker) -> Announcement:
    return msgspec.json.decode(orjson.dumps(announcement_fields(engine)), type=Announcement)


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", "secret", False), ("127.0.0.1", "", False)],
)
def test_a_router_that_accepts_local_announcements_only_logs_it(
    host: str, token: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    members_of(None, token=token).warn_if_local_only(host)
    assert ("PPD_WORKER_TOKEN" in caplog.text) is warned


@pytest.mark.parametrize(
    ("sender", "secret", "token", "status"),
    [
        ("10.1.2.3", "theirs", "", 200),  # of this host by the address at which it was asked
        ("10.1.2.3", "a guess", "", 200),  # without the secret the header is ignored
        ("127.0.0.1", "theirs", "", 200),
        ("10.1.2.3", "theirs", "s3cret", 200),
    ],
)
async def test_without_a_token_only_workers_of_this_host_join(
    sender: str, secret: str, token: str, status: int
) -> None:
    """A peer with the right secret has checked the sender."""
    newcomer = FakeWorker("decode", answering())
    async with newcomer.serving(), aiohttp.ClientSession() as http:
        app, registry = web.Application(middlewares=[answer_errors]), WorkerRegistry(http)
        members_of(registry, token=token, peers=Peers(0, {}, "theirs")).add_routes(app)
        async with TestServer(app) as server:
            headers = {**TOKEN, PASSED_ON: sender, PEER_HEADER: secret}
            async with http.post(
                server.make_url(PATH), json=announcement_fields(newcomer), headers=headers
            ) as answer:
                assert answer.status == status
        assert len(registry.workers) == (status == 200)


def members_of(registry: Any, **options: Any) -> Membership:
    usual = {"roles": (Role.DECODE,), "budget_s": 1, "clock": time.monotonic}
    return Membership(registry, **{**usual, **options})
