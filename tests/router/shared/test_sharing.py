"""Replicas of the router before the same workers, with a shared store and without."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from eval.fake_worker.worker import FakeWorker
from eval.store_server import StoreServer
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.evictions import Evictions
from ppd.sessions import SessionIndex, Turn
from ppd.shared_records import Batch, SharedTurn, decode
from router.shared.metrics import SharedMetrics
from router.shared.sharing import Sharing
from router.shared.store import Store
from router.workers.registry import WorkerRegistry

from ..conftest import Client, Cluster
from ..fixtures import model_workers, serving, until
from ..scripts import answering
from .conftest import shared

MAX_VISIBILITY_S = 0.1


def engines() -> list[FakeWorker]:
    decode = [FakeWorker("decode", answering(cached=96)) for _ in range(3)]
    return [FakeWorker("prefill", answering()), *decode]


@asynccontextmanager
async def replicas(
    cluster: Cluster, workers: Sequence[FakeWorker], count: int, **options: Any
) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(cluster(*workers, **options)) for _ in range(count)]


async def turns(router: Client) -> float:
    return await router.metric("ppd_known_turns")


async def knows(router: Client, count: int) -> None:
    async def holds() -> bool:
        return await turns(router) >= count

    await until(holds)


async def local_share(routers: list[Client], conversations: int, *, shares: bool) -> float:
    """The share of later turns that were local; each turn goes to the next router."""
    local = later = 0
    for number in range(conversations):
        said = [f"hello {number}"]
        for turn in range(6):
            router = routers[(number + turn) % len(routers)]
            reply = await router.chat(*said)
            assert reply.status == 200
            if turn:
                later += 1
                local += reply.route[0] == "local"
            said += ["www", f"and {turn}"]
            if shares:
                for one in routers:
                    await knows(one, number * 6 + turn + 1)
    return local / later


async def test_turns_that_alternate_over_three_replicas_are_local(
    cluster: Cluster, server: StoreServer
) -> None:
    workers = engines()
    async with replicas(cluster, workers, 3, shared=shared(server)) as routers:
        assert await local_share(routers, 5, shares=True) == 1.0


async def test_without_the_store_some_of_these_turns_are_remote(cluster: Cluster) -> None:
    async with replicas(cluster, engines(), 3) as routers:
        share = await local_share(routers, 5, shares=False)
    assert share == pytest.approx(0.6)  # the second and the third turn: no router has seen it


async def test_a_turn_continues_what_another_replica_has_served_in_all_its_numbers(
    cluster: Cluster, server: StoreServer
) -> None:
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        await one.chat("hello")
        await knows(other, 1)
        await other.chat("hello", "www", "and")
        await knows(one, 2)
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        body["messages"] += [  # type: ignore[operator]
            {"role": "assistant", "content": "www"},
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": "www"},
            {"role": "user", "content": "more"},
        ]
        shown = [
            (await router.post("/explain/v1/chat/completions", body)).json["features"]
            for router in (one, other)
        ]
        for features in shown:
            del features["qps"]
        assert shown[0] == shown[1]
        assert shown[0]["turn"] == 3


async def test_a_prompt_is_continued_at_another_replica(
    cluster: Cluster, server: StoreServer
) -> None:
    """A prompt is found by its tail behind a block, which is shared too."""
    prompt = "once upon a time " * 200
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        await one.post("/v1/completions", {"model": "fake", "prompt": prompt})
        await knows(other, 1)
        longer = {"model": "fake", "prompt": prompt + "www and so on " * 20}
        assert (await other.post("/v1/completions", longer)).route == ("local", "policy_full")


async def test_a_record_is_visible_within_a_tenth_of_a_second(
    cluster: Cluster, server: StoreServer
) -> None:
    took_s = []
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        for number in range(20):
            await one.chat(f"hello {number}")
            ended_s = time.monotonic()
            await knows(other, number + 1)
            took_s.append(time.monotonic() - ended_s)
    assert sorted(took_s)[len(took_s) // 2] < MAX_VISIBILITY_S


async def test_a_replica_that_starts_later_has_the_conversations_of_the_others(
    cluster: Cluster, server: StoreServer
) -> None:
    workers = engines()
    async with replicas(cluster, workers, 1, shared=shared(server)) as (one,):
        for number in range(5):
            await one.chat(f"hello {number}")
        await until_written(server, 5)
        async with replicas(cluster, workers, 1, shared=shared(server)) as (late,):
            assert await turns(late) == 5
            reply = await late.chat("hello 3", "www", "and")
            assert reply.route == ("local", "policy_full")


async def test_a_restarted_replica_has_its_own_conversations_again(
    cluster: Cluster, server: StoreServer
) -> None:
    """A stop writes what is queued."""
    workers = engines()
    async with serving(*workers):
        async with replicas(cluster, workers, 1, shared=shared(server)) as (one,):
            await one.chat("hello")
        async with replicas(cluster, workers, 1, shared=shared(server)) as (one,):
            reply = await one.chat("hello", "www", "and")
            assert reply.route == ("local", "policy_full")


async def test_records_whose_lifetime_has_passed_are_not_taken(
    cluster: Cluster, server: StoreServer
) -> None:
    workers = engines()
    async with replicas(cluster, workers, 1, shared=shared(server)) as (one,):
        await one.chat("hello")
        await until_written(server, 1)
        async with replicas(
            cluster, workers, 1, shared=shared(server, ttl_s=1e-3), session_ttl_s=1e-3
        ) as (other,):
            assert await turns(other) == 0


async def test_no_prompt_is_in_the_store(cluster: Cluster, server: StoreServer) -> None:
    secret = "a secret of this prompt"
    async with replicas(cluster, engines(), 1, shared=shared(server)) as (one,):
        await one.chat(secret, user="a person")
        await one.post("/v1/completions", {"model": "fake", "prompt": f"{secret} " * 100})
        await until_written(server, 2)
        store = Redis(port=server.port)
        async with store:
            keys = await store.keys()
            content = repr([await store.dump(key) for key in keys]) + repr(await stream(server))
    assert "secret" not in content
    assert "person" not in content
    assert "www" not in content


@pytest.mark.parametrize("kind", ["password_file", "username", "unix"])
async def test_how_the_server_is_reached(
    cluster: Cluster, new_server: Any, tmp_path: Any, kind: str
) -> None:
    file = tmp_path / "password"
    file.write_text("right\n")
    socket = tmp_path / "socket"
    flags: tuple[str, ...]
    given: dict[str, object]
    match kind:
        case "password_file":
            flags, given = ("--requirepass", "right"), {"password_file": str(file)}
        case "username":
            flags = ("--user", *documented_user())
            given = {"username": "router", "password": "right"}
        case _:
            flags, given = ("--unixsocket", str(socket)), {"url": f"unix://{socket}"}
    async with new_server(*flags).running() as server:
        options = shared(server, **given)
        async with replicas(cluster, engines(), 2, shared=options) as (one, other):
            await one.chat("hello")
            await knows(other, 1)
            assert await one.metric("ppd_fallback", kind="not_shared") == 0


def documented_user() -> list[str]:
    """The rule of the server's ACL that the document gives, with another password."""
    text = Path("docs/SEVERAL_ROUTERS.md").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("ACL SETUSER router ")]
    rules = [rule for line in lines for rule in line[3:]]
    return ["router", *(rule.replace(">PASSWORD", ">right") for rule in rules)]


async def test_a_drain_reaches_every_replica_and_those_that_start_later(
    cluster: Cluster, server: StoreServer
) -> None:
    workers = engines()
    drained = workers[1]

    async def draining(router: Client) -> bool:
        return bool((await router.workers())[drained.url]["draining"])

    async with replicas(cluster, workers, 2, shared=shared(server)) as (one, other):
        path = drained.url.removeprefix("http://")
        assert (await one.post(f"/workers/{path}/drain", {})).status == 200
        await until(lambda: draining(other))
        async with replicas(cluster, workers, 1, shared=shared(server)) as (late,):
            assert await draining(late)
        assert (await other.post(f"/workers/{path}/resume", {})).status == 200

        async def resumed() -> bool:
            return not await draining(one)

        await until(resumed)
        async with replicas(cluster, workers, 1, shared=shared(server)) as (late,):
            assert not await draining(late)


async def test_a_drain_made_without_the_store_is_shared_when_it_is_back(
    cluster: Cluster, server: StoreServer
) -> None:
    workers = engines()
    drained = workers[1]
    async with replicas(cluster, workers, 2, shared=shared(server)) as (one, other):
        await server.kill()
        path = drained.url.removeprefix("http://")
        assert (await one.post(f"/workers/{path}/drain", {})).status == 200
        await server.start()

        async def draining() -> bool:
            return bool((await other.workers())[drained.url]["draining"])

        await until(draining)


async def stream(server: StoreServer) -> list[Any]:
    async with Redis(port=server.port) as store:
        return list(await store.xrange("ppd:turns") or ())


async def until_written(server: StoreServer, records: int) -> None:
    async def holds() -> bool:
        entries = await stream(server)
        return sum(len(decode(fields[b"b"], 0.0).turns) for _, fields in entries) >= records

    await until(holds)


async def test_a_turn_of_another_router_is_no_longer_evicted(
    cluster: Cluster, server: StoreServer
) -> None:
    """Its worker has served it again, which the events of evictions do not show."""
    (home,) = model_workers(decode=1).of(Role.DECODE)
    registry = WorkerRegistry(control=None)  # type: ignore[arg-type]
    registry.join(home.server)
    home.evictions = Evictions()
    sharing = Sharing(
        config=shared(server),
        store=Store(shared(server), 60.0),
        ttl_s=60.0,
        registry=registry,
        metrics=SharedMetrics(CollectorRegistry()),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    sharing.serve("m", SessionIndex(capacity=10, ttl_s=60.0), Backlog())
    now_s = time.monotonic()

    def arrive(finished_at_s: float) -> int:
        assert home.evictions is not None
        home.evictions.stored(7, None, [1, 2], 16)
        home.evictions.removed([1, 2])
        turn = Turn(7, 1, home.identity, 32, 1, None, 0, 1.0)
        shared_turn = SharedTurn(bytes(16), turn, finished_at_s=finished_at_s, model="m")
        sharing.apply(Batch(turns=(shared_turn,)), b"another")
        return home.evictions.lost(7)

    assert arrive(now_s - 1.0) == 0
    assert arrive(now_s - 2.0) == 32, "an older record is no news"
    await sharing.close()
