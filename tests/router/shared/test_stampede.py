"""Several replicas before one decode worker: the append budget is one budget, within the bound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from eval.store_server import StoreServer
from ppd.table_policy import Correction

from ..conftest import Client, Cluster
from ..fixtures import CHAT, chat, until
from ..scripts import answering
from .conftest import shared
from .test_killed_replica import continues
from .test_sharing import replicas

REPLICAS, CONVERSATIONS, BUDGET_TURNS = 4, 40, 8
BOUND_TURNS = (2 - 1 / REPLICAS) * BUDGET_TURNS + (REPLICAS - 1) * (1 - 1 / REPLICAS)


class Gate:
    """The decode worker answers local turns when the gate is open."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.waiting = 0

    async def __call__(self, request: Request) -> None:
        if "custom_params" in request.body:
            self.waiting += 1
            await self.opened.wait()
        await answering(prompt=100, cached=96)(request)


def engines(gate: Gate) -> list[FakeWorker]:
    return [FakeWorker("prefill", answering()), FakeWorker("decode", gate)]


async def tokens_of_a_turn(cluster: Cluster, table: Path) -> int:
    """What one of the later turns below adds to the worker's backlog."""
    async with cluster(*engines(Gate()), policy="ppd", table=str(table)) as client:
        await client.chat("hello 0", stream=True)
        asked = await client.post("/explain" + CHAT, chat("hello 0", "w0w1w2", "", stream=True))
        seen = asked.json["features"]
        return int(seen["context_tokens"] // 16 * -16 + seen["context_tokens"] + seen["new_tokens"])


async def local_turns(routers: list[Client], gate: Gate, *, shares: bool) -> int:
    """Send a later turn of every conversation at once, and return how many are local."""
    for number in range(CONVERSATIONS):
        await routers[number % len(routers)].chat(f"hello {number}", stream=True)
    if shares:
        for router in routers:
            await sees_all(router)
            for number in range(CONVERSATIONS - len(routers), CONVERSATIONS):
                await continues(router, f"hello {number}")
    tasks = [
        asyncio.create_task(
            routers[number % len(routers)].chat(f"hello {number}", "w0w1w2", "", stream=True)
        )
        for number in range(CONVERSATIONS)
    ]

    async def decided() -> bool:
        await routers[0].metric("ppd_qps")  # a round trip
        return gate.waiting + sum(task.done() for task in tasks) == CONVERSATIONS

    await until(decided)
    found = gate.waiting
    gate.opened.set()
    replies = await asyncio.gather(*tasks)
    assert {reply.status for reply in replies} == {200}
    assert sum(reply.route[0] == "local" for reply in replies) == found
    return found


async def sees_all(router: Client) -> None:
    async def holds() -> bool:
        return await router.metric("ppd_shared_routers") == REPLICAS

    await until(holds)


def options(table: Path, each: int) -> dict[str, Any]:
    return {
        "policy": "ppd",
        "table": str(table),
        "append_budget_tokens": BUDGET_TURNS * each + 1,
        "corrections": frozenset({Correction.RESERVATION}),
    }


async def test_replicas_that_share_stay_within_the_bound(
    cluster: Cluster, table: Path, server: StoreServer
) -> None:
    each, gate = await tokens_of_a_turn(cluster, table), Gate()
    chosen = {**options(table, each), "shared": shared(server)}
    async with replicas(cluster, engines(gate), REPLICAS, **chosen) as routers:
        assert 0 < await local_turns(routers, gate, shares=True) <= BOUND_TURNS


async def test_replicas_that_do_not_share_take_a_budget_each(cluster: Cluster, table: Path) -> None:
    each, gate = await tokens_of_a_turn(cluster, table), Gate()
    async with replicas(cluster, engines(gate), REPLICAS, **options(table, each)) as routers:
        assert await local_turns(routers, gate, shares=False) == REPLICAS * BUDGET_TURNS


async def test_one_replica_uses_what_the_others_leave(
    cluster: Cluster, table: Path, server: StoreServer
) -> None:
    """One after the other: the whole budget is used, and no turn more."""
    each, gate = await tokens_of_a_turn(cluster, table), Gate()
    chosen = {**options(table, each), "shared": shared(server)}
    async with replicas(cluster, engines(gate), 2, **chosen) as (one, other):
        for number in range(BUDGET_TURNS + 4):
            await one.chat(f"hello {number}", stream=True)
        await continues(other, f"hello {BUDGET_TURNS + 3}")
        tasks = []
        for number in range(BUDGET_TURNS):
            body = (f"hello {number}", "w0w1w2", "")
            tasks.append(asyncio.create_task(one.chat(*body, stream=True)))

            async def seen(expected: int = (number + 1) * each) -> bool:
                return {await claimed(one), await claimed(other)} == {expected}

            await until(seen)
        for number in range(BUDGET_TURNS, BUDGET_TURNS + 4):
            reply = await other.chat(f"hello {number}", "w0w1w2", "", stream=True)
            assert reply.route == ("remote", "append_budget")
        assert gate.waiting == BUDGET_TURNS
        gate.opened.set()
        assert {(await task).route[0] for task in tasks} == {"local"}


async def claimed(router: Client) -> int:
    """Tokens that a router counts against the budget of the one decode worker."""
    body = chat("hello 0", "w0w1w2", "", stream=True)
    asked = await router.post("/explain" + CHAT, body)
    return int(asked.json["features"]["home_claimed_tokens"])
