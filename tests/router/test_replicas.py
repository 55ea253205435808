"""Routers that know nothing of each other, before the same workers."""

from __future__ import annotations

import random

import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.contract import Role

from .conftest import Cluster
from .fixtures import model_workers
from .scripts import answering


def test_conversations_are_spread_and_move_little_when_a_worker_leaves() -> None:
    roots = [random.Random(i).randbytes(16) for i in range(2000)]
    group = model_workers(decode=4)
    before = [group.place(Role.DECODE, None, root=root) for root in roots]
    counts = [before.count(worker) for worker in group.workers]
    assert min(counts) > 400
    gone = group.workers[1]
    gone.server.draining = True
    after = [group.place(Role.DECODE, None, root=root) for root in roots]
    moved = sum(a is not b for a, b in zip(before, after, strict=True))
    assert moved == counts[1]


def test_no_worker_gets_much_more_than_its_share_of_one_opening() -> None:
    group = model_workers(decode=4)
    for _ in range(400):
        worker = group.place(Role.DECODE, None, root=b"the same hello..")
        assert worker is not None
        worker.in_flight += 1
    assert max(w.in_flight for w in group.workers) <= 1.25 * 100 + 1


@pytest.mark.parametrize("field", ["", "prompt_cache_key", "user"])
async def test_a_conversation_may_be_named_by_its_sender(cluster: Cluster, field: str) -> None:
    """The same name leads to the same worker, whatever is said."""
    decode = [FakeWorker("decode", answering()) for _ in range(8)]
    async with cluster(FakeWorker("prefill", answering()), *decode) as client:

        async def asked(name: str, text: str) -> FakeWorker:
            for engine in decode:
                engine.legs.clear()
            named = {field: name} if field else {}
            body = {"messages": [{"role": "user", "content": text}], **named}
            await client.post("/v1/chat/completions", body, {} if field else {"X-Session-ID": name})
            return next(d for d in decode if d.bodies)

        assert len({(await asked("one", f"text {i}")).url for i in range(12)}) == 1
        assert len({(await asked(f"name {i}", f"another {i}")).url for i in range(12)}) > 1


async def test_a_turn_that_comes_to_another_router_is_one_remote_turn_at_the_same_home(
    cluster: Cluster,
) -> None:
    prefill = [FakeWorker("prefill", answering()) for _ in range(2)]
    decode = [FakeWorker("decode", answering(cached=96)) for _ in range(3)]
    async with cluster(*prefill, *decode) as one, cluster(*prefill, *decode) as other:
        for i in range(10):
            first = await one.chat(f"hello {i}")
            assert first.route == ("remote", "first_turn")
            home = next(d for d in decode if d.bodies)
            second = await other.chat(f"hello {i}", "www", "and")
            assert second.route == ("remote", "first_turn")  # it has not seen the first
            third = await other.chat(f"hello {i}", "www", "and", "www", "more")
            assert third.route == ("local", "policy_full")
            back = await one.chat(*[f"hello {i}", "www", "and", "www", "more", "www", "on"])
            assert back.route == ("local", "policy_full")
            assert len(home.bodies) == 4
            for engine in (*prefill, *decode):
                engine.legs.clear()
