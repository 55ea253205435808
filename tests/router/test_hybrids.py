"""Clusters with workers that do both beside prefill and decode workers."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.contract import Role
from ppd.decision import Route

from .conftest import Cluster
from .fixtures import model_workers
from .scripts import answering, failing

APART = ("remote", "first_turn")
BOTH = ("replica", "first_turn")


def engines(replicas: int = 1) -> list[FakeWorker]:
    several = [FakeWorker("null", answering(), local_prefill=False) for _ in range(replicas)]
    return [FakeWorker("prefill", answering()), FakeWorker("decode", answering()), *several]


def roots(number: int) -> list[bytes]:
    return [random.Random(i).randbytes(16) for i in range(number)]


async def test_conversations_stay_with_the_kind_of_home_they_began_on(cluster: Cluster) -> None:
    async with cluster(*(all_of := engines())) as client:
        began = {i: (await client.chat(f"hello {i}")).route for i in range(30)}
        assert set(began.values()) == {APART, BOTH}
        for i, route in began.items():
            later = (await client.chat(f"hello {i}", "www", "and")).route
            stays = ("replica", "home_replica") if route == BOTH else ("local", "policy_full")
            assert later == stays
    replica = all_of[2]
    assert len(replica.bodies) == 2 * list(began.values()).count(BOTH)
    assert not any({"bootstrap_room", "custom_params"} & body.keys() for body in replica.bodies)


@pytest.mark.parametrize(("prefill", "decode", "replica"), [(1, 1, 1), (1, 1, 2), (2, 1, 1)])
def test_each_gpu_gets_its_share(prefill: int, decode: int, replica: int) -> None:
    pool = model_workers(prefill=prefill, decode=decode, replica=replica)
    began = [pool.opening(root) for root in roots(2000)]
    share = replica / (prefill + decode + replica)
    assert began.count(Route.REPLICA) == pytest.approx(2000 * share, abs=100)
    assert began == [pool.opening(root) for root in roots(2000)], "other routers agree"


def test_a_side_that_has_too_much_under_way_gets_no_more() -> None:
    pool = model_workers(prefill=1, decode=1, replica=1)
    busy = {Route.REPLICA: pool.of(Role.REPLICA)[0], Route.REMOTE: pool.of(Role.DECODE)[0]}
    for route, worker in busy.items():
        worker.in_flight = 20
        assert route not in {pool.opening(root) for root in [None, *roots(50)]}
        worker.in_flight = 0


def test_one_kind_alone_is_no_choice() -> None:
    assert model_workers(prefill=1, decode=1).opening(b"root....") is None
    assert model_workers(replica=2).opening(b"root....") is Route.REPLICA
    assert model_workers(prefill=2, replica=1).opening(b"root....") is Route.REPLICA


async def test_a_lost_replica_leaves_its_conversations_to_the_others(cluster: Cluster) -> None:
    async with AsyncExitStack() as stack:
        all_of = engines()
        for worker in all_of:
            await stack.enter_async_context(worker.serving())
        async with cluster(*all_of) as client:
            there = [i for i in range(12) if (await client.chat(f"hello {i}")).route == BOTH]
            await all_of[2].close()
            for i in there:
                later = await client.chat(f"hello {i}", "www", "and")
                assert (later.status, later.route[0]) == (200, "remote")
            assert (await client.chat("and another")).route == APART


@pytest.mark.parametrize("lost", [0, 1])
async def test_without_prefill_or_decode_worker_a_replica_serves(
    cluster: Cluster, lost: int
) -> None:
    async with AsyncExitStack() as stack:
        all_of = engines()
        for worker in all_of:
            await stack.enter_async_context(worker.serving())
        async with cluster(*all_of, policy="pd") as client:
            there = [i for i in range(12) if (await client.chat(f"hello {i}")).route == APART]
            await all_of[lost].close()
            # A decode worker that holds a conversation serves it without a prefill worker, too.
            able = {"replica"} if lost else {"replica", "local"}
            for i in there:
                later = await client.chat(f"hello {i}", "www", "and")
                assert later.status == 200
                assert later.route[0] in able
            assert (await client.chat("another")).route[0] == "replica"
            async with client.http.get(f"{client.url}/health") as health:
                assert health.status == 200


async def test_a_replica_that_fails_is_one_try(cluster: Cluster) -> None:
    all_of = engines()
    all_of[2].script = failing(500, "broken")
    async with cluster(*all_of, breaker_failures=0) as client:
        served = [await client.chat(f"hello {i}") for i in range(12)]
    assert {one.status for one in served} == {200}
    assert {one.route[0] for one in served} == {"remote"}
    assert all_of[2].bodies, "none was sent there"
