"""Data parallelism: each rank of a server is a home of its own, before fake workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eval.fake_worker.ranks import Ranks
from eval.fake_worker.request import Request
from eval.fake_worker.state import IDLE_TOKENS, MODEL
from eval.fake_worker.worker import FakeWorker

from ..conftest import Client, Cluster
from ..fixtures import CHAT, until
from ..scripts import answering, failing, gated

_RANK = "routed_dp_rank"
_FOUND = answering(prompt=100, cached=96)


class Script:
    """A script of a server with ranks that refuses local turns without KV."""

    def __init__(self) -> None:
        self.ranks = Ranks()

    async def __call__(self, request: Request) -> None:
        """Answer as the rank of a request does."""
        ranks = request.worker.dp_size
        if ranks == 1:
            assert _RANK not in request.body
        refused = await self.ranks.take(request.leg.body, ranks)
        await (_FOUND if refused is None else failing(503, refused))(request)


def ranked(prefill_ranks: int = 1, decode_ranks: int = 2) -> tuple[FakeWorker, FakeWorker]:
    p, d = (FakeWorker(role, Script()) for role in ("prefill", "decode"))
    p.dp_size, d.dp_size = prefill_ranks, decode_ranks
    return p, d


def ranks_of(worker: FakeWorker) -> Ranks:
    assert isinstance(worker.script, Script)
    return worker.script.ranks


async def converse(client: Client, opening: str, turns: int) -> list[tuple[str, str]]:
    contents, routes = [opening], []
    for _ in range(turns):
        routes.append((await client.chat(*contents)).route)
        contents += ["www", "and"]
    return routes


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (4, 2), (2, 3)])
async def test_a_conversation_keeps_its_ranks_on_both_sides(
    cluster: Cluster, prefill_ranks: int, decode_ranks: int
) -> None:
    p, d = ranked(prefill_ranks, decode_ranks)
    async with cluster(p, d) as client:
        for number in range(24):
            assert await converse(client, f"hello {number}", 3) == [
                ("remote", "first_turn"),
                *[("local", "policy_full")] * 2,
            ]
    homes = [ranks_of(d).served[3 * i : 3 * i + 3] for i in range(24)]
    assert all(len(set(ranks)) == 1 for ranks in homes)
    assert set(ranks_of(d).served) == set(range(decode_ranks))
    assert set(ranks_of(p).served) == set(range(prefill_ranks))
    assert all(0 <= body["bootstrap_room"] < 2**63 for body in p.bodies)
    assert not [body for body in p.bodies if _RANK in body], "its rank is its room's"


async def test_remote_turns_find_their_rank_of_a_prefill_worker(cluster: Cluster) -> None:
    p, d = ranked(prefill_ranks=4, decode_ranks=1)
    async with cluster(p, d, policy="pd") as client:
        for number in range(12):
            await converse(client, f"hello {number}", 3)
    ranks = [set(ranks_of(p).served[3 * i : 3 * i + 3]) for i in range(12)]
    assert [len(of_one) for of_one in ranks] == [1] * 12
    assert len(set.union(*ranks)) > 1


@pytest.mark.parametrize("lost", ["flushed", "on another rank"])
async def test_a_rank_without_the_kv_costs_one_remote_turn(cluster: Cluster, lost: str) -> None:
    p, d = ranked()
    async with cluster(p, d) as client:
        contents, routes = ["one"], []
        for turn in range(5):
            if turn == 2:
                (home,) = set(ranks_of(d).served)
                if lost == "flushed":
                    ranks_of(d).flush()
                else:
                    ranks_of(d).swap(home, 1 - home)
            routes.append((await client.chat(*contents)).route)
            contents += ["www", "and"]
    local = ("local", "policy_full")
    lost_turn = ("remote", "refused_by_worker")
    assert routes == [("remote", "first_turn"), local, lost_turn, local, local]
    assert set(ranks_of(d).served) == {home}


async def test_a_silent_rank_is_left_alone_and_the_others_serve(cluster: Cluster) -> None:
    p, d = ranked()
    async with cluster(p, d, answer_timeout_s=0.2) as client:
        await client.chat("one")
        (home,) = set(ranks_of(d).served)
        ranks_of(d).silent.add(home)
        await asyncio.gather(*(client.chat(f"other {i}") for i in range(30)))
        before = len(ranks_of(d).served)
        replies = await asyncio.gather(*(client.chat(f"another {i}") for i in range(10)))
        assert [reply.status for reply in replies] == [200] * 10
        assert set(ranks_of(d).served[before:]) == {1 - home}
        shown = await shown_of(client, d)
        assert shown[home]["breaker_open"]
        assert not shown[1 - home]["breaker_open"]
        assert shown[home]["alive"]


async def shown_of(client: Client, worker: FakeWorker) -> list[dict[str, Any]]:
    """What the router shows of a server's ranks, by rank."""
    async with client.http.get(f"{client.url}/workers") as response:
        shown = [one for one in await response.json() if one["url"] == worker.url]
    return sorted(shown, key=lambda one: str(one["id"]))


async def test_a_full_rank_gets_no_new_conversations(cluster: Cluster) -> None:
    p, d = ranked()
    d.free_tokens, d.free_of_ranks = IDLE_TOKENS, {1: 0}
    gate = asyncio.Event()

    async def script(request: Request) -> None:
        holds = request.body["messages"][0]["content"].startswith("held")
        await (gated(gate) if holds else _FOUND)(request)

    d.script = script
    async with cluster(p, d) as client:
        await d.load_is_known()
        held, number = [], 0
        while {body[_RANK] for body in d.bodies} != {0, 1}:  # an idle rank has room
            held.append(asyncio.create_task(client.chat(f"held {number}", stream=True)))
            number += 1
            d.arrived.clear()
            await d.arrived.wait()
        before = len(d.bodies)
        for number in range(8):
            await client.chat(f"hello {number} " + 40 * "and so on ")
        assert {body[_RANK] for body in d.bodies[before:]} == {0}
        gate.set()
        await asyncio.gather(*held)


async def test_ranks_are_shown_and_drained_together(cluster: Cluster) -> None:
    p, d = ranked()
    async with cluster(p, d) as client:
        shown = await shown_of(client, d)
        host = d.url.removeprefix("http://")
        assert [one["id"] for one in shown] == [f"{host}@0", f"{host}@1"]
        await client.chat("hello")
        in_flight = {"role": "decode", "worker": f"{d.url}@1"}
        assert await client.metric("ppd_in_flight", **in_flight) == 0
        async with client.http.post(f"{client.url}/workers/{host}/drain") as response:
            assert (await response.json())["draining"]
        assert all(one["draining"] for one in await shown_of(client, d))


async def test_a_body_may_begin_with_white_space(cluster: Cluster) -> None:
    p, d = ranked()
    async with cluster(p, d) as client:
        body = b'\n {"model": "%b", "messages": [{"role": "user", "content": "hi"}]} \n'
        reply = await client.post(CHAT, body % MODEL.encode())
        assert reply.status == 200
        assert d.bodies[-1][_RANK] in (0, 1)


async def test_a_restarted_server_may_have_another_number_of_ranks(cluster: Cluster) -> None:
    p, d = ranked()
    async with cluster(p, d) as client:
        await client.chat("one")
        for ranks in (3, 1):
            d.vanish()

            async def is_down() -> bool:
                return not any(one["alive"] for one in await shown_of(client, d))

            await until(is_down)
            d.dp_size, d.script = ranks, Script()
            await d.restart()

            async def has_ranks(expected: int = ranks) -> bool:
                shown = await shown_of(client, d)
                return len(shown) == expected and all(one["alive"] for one in shown)

            await until(has_ranks)
            assert await converse(client, "one", 1) == [("remote", "home_gone")]
            for number in range(20):
                await client.chat(f"new {number}")
            assert set(ranks_of(d).served) == set(range(ranks))
