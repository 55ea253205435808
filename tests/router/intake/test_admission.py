"""Who is let in: slots, KV headroom, queues, rates, keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.errors import Overloaded, RequestError
from router.config.limits import AdmissionLimits, RateLimit, Tenant
from router.intake.admission import Admission
from router.intake.keys import KeyRing
from router.intake.rates import Rates
from router.observability.metrics import Metrics
from tests.unit.test_media import encoded, picture
from tests.waiting import HANG_S

from ..conftest import CHAT_BODY, Client, Cluster
from ..scripts import answering, gated


def make(has_room: Callable[[int], bool] = lambda _: True, **limits: Any) -> Admission:
    return Admission(AdmissionLimits(**limits), has_room, Metrics(), lambda: 0.0)


async def turns_of_the_loop(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_each_ones_requests_keep_their_order() -> None:
    admission = make(max_in_flight=1)
    await admission.enter("a", 1)
    order: list[str] = []

    async def ask(tenant: str, name: str) -> None:
        await admission.enter(tenant, 1)
        order.append(name)
        admission.leave()

    async with asyncio.TaskGroup() as tasks:
        for tenant, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")):
            tasks.create_task(ask(tenant, name))
        await turns_of_the_loop()
        assert admission.waiting == 5
        admission.leave()
    assert order == ["a1", "b1", "c1", "a2", "a3"]
    assert admission.waiting == 0


async def test_a_full_queue_refuses_and_so_does_the_deadline() -> None:
    admission = make(max_in_flight=1, max_waiting=1, max_wait_s=0.05)
    await admission.enter("a", 1)
    waiting = asyncio.create_task(admission.enter("a", 1))
    await turns_of_the_loop()
    with pytest.raises(Overloaded, match="as many as may") as full:
        await admission.enter("b", 1)
    assert full.value.retry_after_s >= 1
    with pytest.raises(Overloaded, match=r"no room for the request within 0\.05 s"):
        await waiting
    assert admission.waiting == 0


async def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    admission = make(max_in_flight=1, max_waiting=4)
    await admission.enter("a", 1)
    order: list[str] = []

    async def ask(name: str) -> None:
        try:
            await admission.enter(name[0], 1)
        except Overloaded:
            order.append(f"no {name}")
        else:
            order.append(name)
            admission.leave()

    async with asyncio.TaskGroup() as tasks:
        for name in ("a1", "a2", "a3", "a4", "b1", "a5", "b2", "b3", "c1"):
            tasks.create_task(ask(name))
            await turns_of_the_loop()
        assert admission.waiting == 4
        assert order == ["no a4", "no a5", "no a3", "no b3", "no a2"]
        admission.leave()
    assert order[5:] == ["a1", "b1", "c1", "b2"]
    assert admission.waiting == 0


async def test_who_hangs_up_while_waiting_takes_no_slot() -> None:
    admission = make(max_in_flight=1)
    await admission.enter("a", 1)
    gone = asyncio.create_task(admission.enter("a", 1))
    stays = asyncio.create_task(admission.enter("a", 1))
    await turns_of_the_loop()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    admission.leave()
    await stays
    assert admission.waiting == 0


async def test_who_hangs_up_when_just_let_in_gives_the_slot_back() -> None:
    admission = make(max_in_flight=1)
    await admission.enter("a", 1)
    gone = asyncio.create_task(admission.enter("a", 1))
    await turns_of_the_loop()
    admission.leave()  # lets it in; before it runs, it is cancelled
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.wait_for(admission.enter("a", 1), HANG_S)


async def test_one_that_fits_overtakes_one_that_does_not_but_not_for_ever() -> None:
    room, now_s = 100, 0.0
    limits = AdmissionLimits(max_wait_s=60.0)
    admission = Admission(limits, lambda tokens: tokens <= room, Metrics(), lambda: now_s)
    await admission.enter("a", 1000)  # nothing runs: the engine shall judge it
    large = asyncio.create_task(admission.enter("a", 500))
    small = asyncio.create_task(admission.enter("b", 50))
    await asyncio.wait_for(small, HANG_S)
    assert not large.done()
    now_s += 31.0
    later = asyncio.create_task(admission.enter("b", 50))
    await turns_of_the_loop()
    assert not later.done()
    room = 600
    admission.admit_next()
    await asyncio.gather(large, later)


async def test_a_tenant_whose_requests_never_fit_starves_nobody() -> None:
    admission = make(lambda tokens: tokens <= 100, max_wait_s=0.02)
    await admission.enter("big", 1000)

    async def ask(tenant: str, tokens: int) -> bool:
        try:
            await admission.enter(tenant, tokens)
        except Overloaded:
            return False
        return True

    big = [asyncio.create_task(ask("big", 1000)) for _ in range(40)]
    small = [asyncio.create_task(ask("small", 50)) for _ in range(40)]
    assert all(await asyncio.gather(*small))
    assert not any(await asyncio.gather(*big))


def limited(rate: RateLimit, *, named: bool = True, **tenants: Tenant) -> tuple[Rates, list[float]]:
    now = [0.0]
    return Rates(rate, tenants, named=named, metrics=Metrics(), clock=lambda: now[0]), now


def test_requests_a_minute_leak_away_one_by_one() -> None:
    rates, now = limited(RateLimit(requests_per_minute=60))
    for _ in range(60):
        rates.charge("t", 10)
    with pytest.raises(Overloaded, match="more than 60 requests a minute") as refused:
        rates.charge("t", 10)
    assert refused.value.retry_after_s == 1
    rates.charge("other", 10)
    now[0] += 1.0
    rates.charge("t", 10)


def test_a_changed_limit_keeps_what_was_counted() -> None:
    rates, now = limited(RateLimit(requests_per_minute=60), t=Tenant())
    for _ in range(60):
        rates.charge("t", 1)
    rates.reload(RateLimit(requests_per_minute=60), {"other": Tenant()}, named=True)
    with pytest.raises(Overloaded):  # others' changes are no way to ask anew
        rates.charge("t", 1)
    rates.reload(RateLimit(requests_per_minute=120), {}, named=True)
    for _ in range(60):
        rates.charge("t", 1)
    with pytest.raises(Overloaded, match="more than 120"):
        rates.charge("t", 1)
    now[0] += 0.5
    rates.charge("t", 1)
    rates.reload(RateLimit(), {}, named=True)
    rates.charge("t", 10**9)


def test_tokens_are_charged_as_expected_and_settled_as_counted() -> None:
    rates, _ = limited(RateLimit(), t=Tenant(rate=RateLimit(tokens_per_minute=600)))
    rates.charge("t", 500)
    rates.charge("t", 500)  # larger than the rest: the next ones pay
    with pytest.raises(Overloaded, match="600 tokens a minute") as refused:
        rates.charge("t", 1)
    assert refused.value.retry_after_s == 41
    rates.settle("t", -450)
    rates.charge("t", 1)
    rates.charge("others have no limit", 10**9)


def test_without_keys_nobody_gets_around_a_limit_by_another_name() -> None:
    rates, _ = limited(RateLimit(requests_per_minute=1), named=False)
    rates.charge("one name", 1)
    with pytest.raises(Overloaded):
        rates.charge("another", 1)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYS = {"alice": Tenant(keys=(digest("a-key"), digest("new-key"))), "bob": Tenant()}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer a-key"},
        {"authorization": "bearer  new-key "},
        {"x-api-key": "a-key"},
    ],
)
def test_a_key_tells_its_tenant_and_is_not_passed_on(headers: dict[str, str]) -> None:
    keys = KeyRing(KEYS, worker_key="")
    assert keys.tenant(headers) == "alice"
    assert keys.forwarded({**headers, "x-request-id": "7"}) == {"x-request-id": "7"}


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, "needed"),
        ({"authorization": "Bearer other"}, "not known"),
        ({"authorization": "Basic a-key"}, "needed"),
        ({"authorization": "Bearer \udcff"}, "not known"),
        ({"authorization": "Bearer ", "x-api-key": "a-key"}, "needed"),
    ],
)
def test_without_a_valid_key_no_request_is_served(headers: dict[str, str], told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        KeyRing(KEYS, worker_key="").tenant(headers)
    assert refused.value.status == 401


def test_workers_get_their_own_key() -> None:
    keys = KeyRing({}, worker_key="inner")
    given = {"authorization": "Bearer outer", "traceparent": "t"}
    assert keys.forwarded(given) == {"authorization": "Bearer inner", "traceparent": "t"}
    assert KeyRing({}, worker_key="").forwarded(given) == given


async def test_keys_guard_the_token_path(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d, tenants=KEYS, worker_api_key="inner") as client:
        refused = await client.post("/v1/chat/completions", CHAT_BODY)
        assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
        assert not d.bodies
        key = {"Authorization": "Bearer a-key"}
        assert (await client.post("/v1/chat/completions", CHAT_BODY, key)).status == 200
        assert d.headers[-1]["authorization"] == "Bearer inner"
        assert d.bodies[-1]["cache_salt"] == "alice"


async def slot_taken(client: Client, d: FakeWorker) -> asyncio.Task[Any]:
    task = asyncio.create_task(client.chat("first", stream=True))
    await asyncio.wait_for(d.arrived.wait(), HANG_S)
    return task


async def test_what_is_too_much_gets_a_429_with_retry_after(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    limits = AdmissionLimits(max_in_flight=1, max_waiting=1)
    async with cluster(p, d, admission=limits) as client:
        first = await slot_taken(client, d)
        second = asyncio.create_task(client.chat("second", stream=True))
        while await client.metric("ppd_admission_waiting") < 1:
            pass
        third = await client.chat("third")
        assert third.status == 429
        assert int(third.headers["Retry-After"]) >= 1
        assert third.json["error"]["type"] == "rate_limit_error"
        gate.set()
        assert [(await one).status for one in (first, second)] == [200, 200]
        for outcome, count in (("ok", 2), ("overloaded", 1)):
            labels = {"endpoint": "/v1/chat/completions", "outcome": outcome}
            assert await client.metric("ppd_finished_total", **labels) == count


async def test_a_client_that_hangs_up_while_it_waits_is_counted(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    async with cluster(p, d, admission=AdmissionLimits(max_in_flight=1)) as client:
        first = await slot_taken(client, d)
        second = asyncio.create_task(client.chat("second"))
        while await client.metric("ppd_admission_waiting") < 1:
            pass
        second.cancel()
        labels = {"endpoint": "/v1/chat/completions", "outcome": "disconnected"}
        while await client.metric("ppd_finished_total", **labels) < 1:
            pass
        gate.set()
        assert (await first).status == 200
        assert len(d.bodies) == 1


async def test_requests_wait_for_kv_that_a_decode_worker_lacks(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    d.free_tokens = 1000
    async with cluster(p, d) as client:
        await d.load_is_known()
        first = await slot_taken(client, d)
        d.free_tokens = 10
        await d.load_is_known()
        second = asyncio.create_task(client.chat("second", stream=True, max_tokens=50))
        while await client.metric("ppd_admission_waiting") < 1:
            pass
        assert len(d.bodies) == 1
        d.free_tokens = 1000
        while len(d.bodies) < 2:
            await client.metric("ppd_admission_waiting")
        gate.set()
        assert [(await one).status for one in (first, second)] == [200, 200]


async def test_a_photo_waits_for_no_more_kv_than_its_patches_need(cluster: Cluster) -> None:
    """In base64 it has 400,000 bytes, which would be 100,000 tokens of text."""
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    d.free_tokens = 10_000
    url = "data:image/jpeg;base64," + encoded(picture("JPEG", 700, 550, quality=95))
    assert 400_000 < len(url) < 1_000_000
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    async with cluster(p, d) as client:
        await d.load_is_known()
        first = await slot_taken(client, d)
        body = {"messages": [{"role": "user", "content": parts}], "stream": True, "max_tokens": 50}
        second = asyncio.create_task(client.post("/v1/chat/completions", body))
        async with asyncio.timeout(HANG_S):
            while len(d.bodies) < 2:
                await client.metric("ppd_admission_waiting")
        assert d.bodies[1]["messages"][-1]["content"] == parts
        gate.set()
        assert [(await one).status for one in (first, second)] == [200, 200]
