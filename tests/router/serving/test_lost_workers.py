"""Workers that are lost, hang or come back: who gets the request, and what is remembered."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from eval.fake_worker.worker import FakeWorker
from tests.waiting import HANG_S

from ..conftest import Client, Cluster
from ..scripts import answering, dropping, hanging
from .faulty import workers


async def test_a_dead_decode_worker_is_passed_over(cluster: Cluster) -> None:
    p, d = workers(answering(), answering())
    gone = FakeWorker("decode", answering())
    async with gone.serving():
        serving = cluster(p, gone, d, probe_interval_s=60.0)
        client = await serving.__aenter__()
    try:  # ``gone`` has stopped; the router does not know yet
        for i in range(30):  # one of them would go there
            assert (await client.chat(f"{i}")).status == 200
        assert await client.metric("ppd_worker_alive", role="decode", worker=gone.url) == 0
    finally:
        await serving.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("boot_id", "route"),
    [("mine", ("local", "policy_full")), ("other", ("remote", "home_gone"))],
    ids=["same-process", "restarted"],
)
async def test_only_a_restarted_home_has_lost_its_conversations(
    cluster: Cluster, boot_id: str, route: tuple[str, str]
) -> None:
    p, d = workers(answering(), answering())
    d.boot_id = "mine"
    async with cluster(p, d) as client:
        await client.chat("hello")
        d.ready = False
        await until_alive(client, d, 0.0)
        d.ready, d.boot_id = True, boot_id
        await until_alive(client, d, 1.0)
        reply = await client.chat("hello", "www", "and")
        assert reply.route == route


async def until_alive(client: Client, engine: FakeWorker, value: float) -> None:
    async def poll() -> None:
        labels = {"role": engine.role, "worker": engine.url}
        while await client.metric("ppd_worker_alive", **labels) != value:
            pass

    await asyncio.wait_for(poll(), HANG_S)


async def test_a_worker_that_hangs_does_not_keep_another_from_being_seen_again(
    cluster: Cluster,
) -> None:
    """Probes take up to five seconds; a worker that is back is seen after one interval."""
    p, d = workers(answering(), answering())
    stuck = FakeWorker("decode", answering())
    async with cluster(p, d, stuck) as client:
        d.ready = False
        await until_alive(client, d, 0.0)
        stuck.probes_hang = True
        await asyncio.wait_for(stuck.probed.wait(), HANG_S)
        d.ready = True
        await asyncio.wait_for(until_alive(client, d, 1.0), 4.0)


async def test_a_home_lost_between_turns_sends_the_turn_elsewhere(cluster: Cluster) -> None:
    p = FakeWorker("prefill", answering())
    decoders = [FakeWorker("decode", answering()) for _ in range(2)]
    async with AsyncExitStack() as alive:
        for worker in decoders:
            await alive.enter_async_context(worker.serving())
        async with cluster(p, *decoders, probe_interval_s=60.0) as client:
            await client.chat("hello")
            (home,) = (d for d in decoders if d.bodies)
            (other,) = (d for d in decoders if not d.bodies)
            await home.close()
            reply = await client.chat("hello", "www", "and")
            assert (reply.status, reply.route) == (200, ("remote", "home_gone"))
            assert len(other.bodies) == 1


async def test_a_request_that_kills_is_sent_twice_at_most(cluster: Cluster) -> None:
    p = FakeWorker("prefill", answering())
    decoders = [FakeWorker("decode", dropping) for _ in range(4)]
    async with cluster(p, *decoders) as client:
        reply = await client.chat("poison")
        assert reply.status == 502
        assert sum(len(d.bodies) for d in decoders) == 2


async def test_a_worker_that_dropped_a_connection_but_lives_keeps_its_conversations(
    cluster: Cluster,
) -> None:
    p, d = workers(answering(), answering())
    async with cluster(p, d) as client:
        await client.chat("hello")
        whole, d.script = d.script, dropping
        assert (await client.chat("other")).status == 502
        assert await client.metric("ppd_worker_alive", role="decode", worker=d.url) == 1
        d.script = whole
        assert (await client.chat("hello", "www", "and")).route == ("local", "policy_full")


async def test_a_silent_worker_is_neither_dead_nor_asked_again(cluster: Cluster) -> None:
    p, d = workers(answering(), hanging)
    async with cluster(p, d, answer_timeout_s=0.2) as client:
        assert (await client.chat("hello")).status == 504
        assert len(d.bodies) == 1
        assert await client.metric("ppd_worker_alive", role="decode", worker=d.url) == 1
