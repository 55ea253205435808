"""Requests that go on elsewhere: whom a failure is blamed on, and what is tried next."""

from __future__ import annotations

import asyncio

import pytest

from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from router.workers.breaker import Breaker
from tests.waiting import HANG_S

from ..conftest import Client, Cluster
from ..fixtures import until
from ..scripts import InTurn, answering, dropping, ending_early, failing, hanging, resetting

NO_TRANSFER = failing(500, "Decode transfer failed for request rank=0 decode_req.req.rid='x'")


def test_a_breaker_opens_rests_and_tries() -> None:
    now_s = 100.0
    breaker = Breaker(failures=2, open_s=10.0, clock=lambda: now_s)

    def state() -> tuple[bool, bool]:
        return breaker.open, breaker.admits

    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert state() == (False, True)
    breaker.failed()
    assert state() == (True, False)
    now_s += 10.0
    assert state() == (True, True)
    breaker.sent()
    assert state() == (True, False)  # one trial at a time
    now_s += 10.0
    breaker.sent()
    breaker.failed()
    assert state() == (True, False)
    breaker.succeeded()
    assert state() == (False, True)


def test_a_breaker_of_no_failures_never_opens() -> None:
    breaker = Breaker(failures=0)
    breaker.failed()
    assert breaker.admits


@pytest.mark.parametrize(
    "fault", [failing(500, "out of memory"), dropping, resetting, ending_early]
)
async def test_failures_of_decode_never_open_prefills_breaker(
    cluster: Cluster, fault: Script
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", fault)
    async with cluster(p, d, breaker_failures=2, breaker_open_s=60.0) as client:
        for i in range(4):
            await client.chat(f"hello {i}", stream=True)
        open_of = {
            e.role: await client.metric("ppd_worker_breaker_open", role=e.role, worker=e.url)
            for e in (p, d)
        }
        assert open_of == {"prefill": 0, "decode": 1}
        # It is the only one, and is asked all the same; as soon as it works, all is well.
        d.script = answering()
        assert (await client.chat("well again")).status == 200
        labels = {"role": "decode", "worker": d.url}
        assert await client.metric("ppd_worker_breaker_open", **labels) == 0


async def test_a_worker_that_fails_again_and_again_is_left_alone(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    bad = FakeWorker("decode", failing(500, "broken card"))
    async with cluster(bad, p, d, breaker_failures=2, breaker_open_s=60.0) as client:
        for i in range(12):  # each that meets it is sent to the other one
            assert (await client.chat(f"hello {i}")).status == 200
        assert len(bad.bodies) == 2


@pytest.mark.parametrize("busy", [503, 429])
async def test_a_busy_worker_is_not_blamed(cluster: Cluster, busy: int) -> None:
    p, d = (FakeWorker("prefill", answering()), FakeWorker("decode", failing(busy, "queue full")))
    async with cluster(p, d, breaker_failures=1) as client:
        assert (await client.chat("hello")).status == busy
        labels = {"role": "decode", "worker": d.url}
        assert await client.metric("ppd_worker_breaker_open", **labels) == 0


async def test_a_failed_transfer_blames_nobody_and_is_tried_again(cluster: Cluster) -> None:
    tried = 0

    async def once(request: Request) -> None:
        nonlocal tried
        tried += 1
        await (NO_TRANSFER if tried == 1 else answering())(request)

    p, d = FakeWorker("prefill", hanging), FakeWorker("decode", once)
    async with cluster(p, d, breaker_failures=1) as client:
        assert (await client.chat("hello", stream=True)).status == 200
        assert len(d.bodies) == 2
        for engine in (p, d):
            labels = {"role": engine.role, "worker": engine.url}
            assert await client.metric("ppd_worker_breaker_open", **labels) == 0
        assert await client.metric("ppd_transfer_errors_total", role="decode") == 1


async def test_transfers_that_always_fail_end_after_one_retry(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", hanging), FakeWorker("decode", NO_TRANSFER)
    async with cluster(p, d) as client:
        reply = await client.chat("hello")
        assert (reply.status, len(d.bodies)) == (500, 2)
        assert "transfer failed" in reply.json["error"]["message"]
        assert reply.headers["X-PPD-Retried"] == "1"
        p.script = d.script = failing(500, "out of memory")
        reply = await client.chat("hello again")
        assert reply.status >= 500
        assert "X-PPD-Retried" not in reply.headers  # there is no other worker


async def test_a_hung_prefill_worker_is_blamed_not_the_decode_worker_that_waits(
    cluster: Cluster,
) -> None:
    prefill = InTurn(hanging, answering())
    prefills = [FakeWorker("prefill", prefill) for _ in range(2)]
    d = FakeWorker("decode", InTurn(hanging, answering()))  # the first one waits for KV
    limits = {"answer_timeout_s": 0.3, "breaker_failures": 1, "breaker_open_s": 60.0}
    async with cluster(*prefills, d, **limits) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), HANG_S)
        assert reply.status == 200
        hung, p = prefill.workers
        assert hung is not p
        for engine, is_open in ((hung, 1), (p, 0), (d, 0)):
            labels = {"role": engine.role, "worker": engine.url}
            assert await client.metric("ppd_worker_breaker_open", **labels) == is_open


async def test_without_prefill_worker_whole_prompts_go_to_decode_if_allowed(
    cluster: Cluster,
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving():
        serving = cluster(p, d, decode_fallback=True)
        client = await serving.__aenter__()
    try:
        first = await client.chat("hello", stream=True)
        assert (first.status, first.route) == (200, ("local", "no_prefill"))
        assert d.bodies[-1]["custom_params"]["do_local_prefill"] is True
        assert d.bodies[-1]["custom_params"]["min_cached_tokens"] == 0
        assert "bootstrap_room" not in d.bodies[-1]
        assert await client.metric("ppd_cache_mispredictions_total") == 0
        async with client.http.get(f"{client.url}/health") as answer:
            assert answer.status == 200, "else load balancers would send nothing"
        later = await client.chat("hello", "w0w1w2", "and")
        assert later.route == ("local", "prefill_down")  # it is a conversation like others
    finally:
        await serving.__aexit__(None, None, None)


async def test_conversations_go_on_while_there_is_no_prefill_worker(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving():
        serving = cluster(p, d, policy="pd", probe_interval_s=0.05)
        client = await serving.__aenter__()
        assert (await client.chat("hello")).route == ("remote", "first_turn")
    try:
        down = {"role": "prefill", "worker": p.url}
        await until(lambda: _has_value(client, 0, "ppd_worker_alive", **down))
        later = await client.chat("hello", "w0w1w2", "and")
        assert (later.status, later.route) == (200, ("local", "prefill_down"))
        other = await client.chat("another")
        assert other.status == 503, "a prompt that no worker holds needs one"
    finally:
        await serving.__aexit__(None, None, None)


async def _has_value(client: Client, value: float, name: str, **labels: str) -> bool:
    return await client.metric(name, **labels) == value


@pytest.mark.parametrize("patched", [True, False])
async def test_the_way_out_is_opt_in_and_needs_the_plugin(cluster: Cluster, patched: bool) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    d.local_prefill = patched
    async with p.serving():
        serving = cluster(p, d, decode_fallback=not patched)
        client = await serving.__aenter__()
    try:
        reply = await client.chat("hello")
        assert (reply.status, len(d.bodies)) == (503, 0)
        assert "no prefill worker" in reply.json["error"]["message"]
    finally:
        await serving.__aexit__(None, None, None)


async def test_a_prefill_worker_that_drops_requests_is_a_way_out_too(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", dropping), FakeWorker("decode", hanging_first())
    async with cluster(p, d, decode_fallback=True) as client:
        reply = await asyncio.wait_for(client.chat("hello"), HANG_S)
        assert (reply.status, reply.route) == (200, ("local", "no_prefill"))


def hanging_first() -> Script:
    """A remote leg waits for KV; a local one answers."""

    async def script(request: Request) -> None:
        chosen = hanging if "bootstrap_room" in request.body else answering()
        await chosen(request)

    return script
