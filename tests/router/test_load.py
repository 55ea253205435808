"""What is under way, and how it moves decisions: queues, reservations, KV that is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from ppd.table_policy import Correction

from .conftest import Cluster
from .fixtures import CHAT, LATER, chat, workers
from .scripts import answering


async def test_turns_decided_at_once_do_not_stampede(cluster: Cluster, table: Path) -> None:
    """Ten conversations come back in the same moment; the budget holds three of them."""
    gate, waiting = asyncio.Event(), list[int]()

    async def gated(request: Request) -> None:
        if "custom_params" in request.body:
            waiting.append(1)
            await gate.wait()
        await answering(prompt=100, cached=96)(request)

    async with cluster(*workers(), policy="ppd", table=str(table)) as client:
        await client.chat("hello 0", stream=True)
        asked = await client.post("/explain" + CHAT, chat("hello 0", "w0w1w2", "", stream=True))
        seen = asked.json["features"]
        each = seen["context_tokens"] // 16 * -16 + seen["context_tokens"] + seen["new_tokens"]
    p, d = workers(gated)
    options: dict[str, Any] = {
        "policy": "ppd", "table": str(table), "append_budget_tokens": 3 * each + 1,
        "corrections": frozenset({Correction.RESERVATION}),
    }  # fmt: skip
    async with cluster(p, d, **options) as client:
        for i in range(10):
            await client.chat(f"hello {i}", stream=True)
        later = [
            asyncio.create_task(client.chat(f"hello {i}", "w0w1w2", "", stream=True))
            for i in range(10)
        ]
        remote, rest = await _first(later, 7)
        assert {reply.route for reply in remote} == {("remote", "append_budget")}
        labels = {"role": "decode", "worker": d.url}
        assert await client.metric("ppd_worker_backlog_tokens", **labels) == 3 * each
        gate.set()
        assert {(await task).route for task in rest} == {("local", "table")}
        assert await client.metric("ppd_worker_backlog_tokens", **labels) == 0
        assert len(waiting) == 3


async def test_first_turns_queue_at_their_prefill_worker(cluster: Cluster, table: Path) -> None:
    """First turns are counted by their bytes until the prefill worker has answered."""
    gate, came = asyncio.Event(), asyncio.Queue[None]()

    async def gated(request: Request) -> None:
        if request.worker.role == "prefill":
            came.put_nowait(None)
        await gate.wait()
        await answering()(request)

    p, d = FakeWorker("prefill", gated), FakeWorker("decode", gated)
    async with cluster(p, d, policy="ppd", table=str(table)) as client:
        turns = [asyncio.create_task(client.chat("x" * 400)) for _ in range(3)]
        for _ in turns:
            await came.get()
        labels = {"role": "prefill", "worker": p.url}
        waiting = await client.metric("ppd_worker_backlog_tokens", **labels)
        assert waiting >= 3 * 100, "a quarter of a token for each byte"
        gate.set()
        assert {(await turn).status for turn in turns} == {200}
        assert await client.metric("ppd_worker_backlog_tokens", **labels) == 0


async def _first(tasks: list[asyncio.Task[Any]], count: int) -> tuple[list[Any], set[Any]]:
    """The results of the first ``count`` tasks to end, and the others."""
    pending, done = set(tasks), list[Any]()
    while len(done) < count:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        done += [task.result() for task in ended]
    return done, pending


async def test_a_full_home_sends_a_turn_elsewhere(cluster: Cluster, table: Path) -> None:
    """The worker says what it has left; a turn that does not fit moves to the other one."""
    p, d = workers()
    other = FakeWorker("decode", answering(prompt=100, cached=96))
    async with cluster(p, d, other, policy="ppd", table=str(table)) as client:
        await client.chat("hello")
        home, away = (d, other) if d.bodies else (other, d)
        home.free_tokens = 5
        await home.load_is_known()
        assert (await client.chat(*LATER)).route == ("remote", "home_full")
        assert (len(home.bodies), len(away.bodies)) == (1, 1)
        assert (await client.chat(*LATER, "www", "more")).route == ("local", "table")
        assert (len(home.bodies), len(away.bodies)) == (1, 2), "it has moved"


async def test_a_worker_that_does_not_tell_its_load_still_serves(cluster: Cluster) -> None:
    p, d = workers()
    d.loads_fail = True
    async with cluster(p, d) as client:
        await client.chat("hello")
        await d.load_is_known()
        assert (await client.chat(*LATER)).route == ("local", "policy_full")


async def test_a_batch_that_ended_is_not_running(cluster: Cluster) -> None:
    """An idle SGLang leaves its last step's load standing."""
    p, d = workers()
    d.free_tokens, d.running = 1000, 7
    async with cluster(p, d) as client:
        await client.chat("hello")

        async def running() -> int:
            reply = await client.post("/explain" + CHAT, chat(*LATER))
            seen: int = reply.json["features"]["home_running"]
            return seen

        await d.load_is_known()
        await d.load_is_known()  # once more, to find it unchanged
        assert await running() == 0
        d.load_written_at += 1.0
        await d.next_load_request()
        d.load_written_at += 1.0  # written between every two looks: it is at work
        for _ in range(3):
            await d.next_load_request()
            d.load_written_at += 1.0
        assert await running() == 7
