"""Stored responses at every replica: encrypted, of their tenant only, and deleted everywhere."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from eval.fake_worker.state import MODEL
from eval.store_server import StoreServer
from ppd.errors import ConfigError
from router.config.limits import Tenant
from router.config.options import RouterConfig
from router.config.shared import SharedConfig
from router.shared import responses
from router.shared.sealing import Sealing, UnsealedError

from ..conftest import Client, Cluster, Reply
from ..fixtures import until
from .conftest import shared
from .test_failing_store import has_problem, serves_as_without, shows
from .test_sharing import engines, replicas

KEY = "5a" * 32


def sharing(server: StoreServer, **options: Any) -> SharedConfig:
    return shared(server, responses=True, responses_key=KEY, **options)


async def respond(
    router: Client, text: str, previous: str | None = None, key: str | None = None
) -> Reply:
    body: dict[str, Any] = {"model": MODEL, "input": text}
    if previous is not None:
        body["previous_response_id"] = previous
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return await router.post("/v1/responses", body, headers)


async def send(router: Client, method: str, name: str) -> int:
    async with router.http.request(method, f"{router.url}/v1/responses/{name}") as answer:
        await answer.read()
        return answer.status


async def test_a_response_is_continued_at_every_replica(
    cluster: Cluster, server: StoreServer
) -> None:
    """At once: the client waits for nothing between two turns."""
    workers = engines()
    async with replicas(cluster, workers, 3, shared=sharing(server)) as routers:
        previous = None
        for turn in range(9):
            reply = await respond(routers[turn % 3], f"turn {turn}", previous)
            assert reply.status == 200, reply.body
            previous = reply.json["id"]
        longest = max((body for one in workers for body in one.bodies), key=lambda b: len(str(b)))
        texts = [message["content"] for message in longest["messages"]]
        assert texts[::2] == [f"turn {turn}" for turn in range(9)]
        assert previous is not None
        assert [await send(router, "GET", previous) for router in routers] == [200, 200, 200]


async def test_without_the_option_a_response_stays_where_it_is(
    cluster: Cluster, server: StoreServer
) -> None:
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        name = (await respond(one, "hello")).json["id"]
        assert (await respond(one, "and", name)).status == 200
        reply = await respond(other, "and", name)
        assert reply.json["error"]["code"] == "previous_response_not_found"
        async with Redis(port=server.port) as store:
            assert not [key async for key in store.scan_iter("*response*")]


async def test_a_deleted_response_is_deleted_everywhere(
    cluster: Cluster, server: StoreServer
) -> None:
    async with replicas(cluster, engines(), 3, shared=sharing(server)) as (one, other, third):
        name = (await respond(one, "hello")).json["id"]
        assert await send(other, "GET", name) == 200
        assert await send(other, "DELETE", name) == 200
        for router in (one, other, third):

            async def gone(router: Client = router) -> bool:
                return await send(router, "GET", name) == 404

            await until(gone)
        async with Redis(port=server.port) as store:
            assert not [key async for key in store.scan_iter("*response*")]


async def test_another_tenant_does_not_get_it(cluster: Cluster, server: StoreServer) -> None:
    tenants = {
        name: Tenant(keys=(hashlib.sha256(name.encode()).hexdigest(),)) for name in ("red", "blue")
    }
    options: dict[str, Any] = {"tenants": tenants, "shared": sharing(server)}
    async with replicas(cluster, engines(), 2, **options) as (one, other):
        name = (await respond(one, "hello", key="red")).json["id"]
        assert (await respond(other, "and", name, key="red")).status == 200
        assert (await respond(other, "and", name, key="blue")).status == 404


async def test_the_store_has_no_text_and_no_tenant(cluster: Cluster, server: StoreServer) -> None:
    async with replicas(cluster, engines(), 2, shared=sharing(server)) as (one, other):
        name = (await respond(one, "a secret of this prompt")).json["id"]
        assert await send(other, "GET", name) == 200
        async with Redis(port=server.port) as store:
            keys = [key async for key in store.scan_iter("ppd:response:*")]
            assert len(keys) == 1
            content = repr(keys) + repr(await store.get(keys[0]))
            assert 0 < await store.pttl(keys[0]) <= 3_600_000
    assert "secret" not in content
    assert name not in content


async def test_a_replica_with_another_key_cannot_read_it(
    cluster: Cluster, server: StoreServer
) -> None:
    """The names depend on the key as well, so the value is put where it is looked for."""
    workers = engines()
    another = shared(server, responses=True, responses_key="11" * 32)
    async with (
        replicas(cluster, workers, 1, shared=sharing(server)) as (one,),
        replicas(cluster, workers, 1, shared=another) as (other,),
        Redis(port=server.port) as store,
    ):
        name = (await respond(one, "hello")).json["id"]
        assert await send(other, "GET", name) == 404

        async def written() -> bool:
            return await one.metric("ppd_shared_responses_sent_total", result="written") == 1

        await until(written)
        (place,) = [key async for key in store.scan_iter("ppd:response:*")]
        tenant = "anonymous"
        for guess in ("", "anonymous", "default"):
            there = Sealing(bytes.fromhex("11" * 32)).place(guess, name)
            await store.set(f"ppd:response:{there}", await store.get(place) or b"")
            tenant = guess
        assert tenant == "default"
        assert await send(other, "GET", name) == 404
        await shows(other, "sealed")


async def test_a_store_that_fails_leaves_responses_where_they_are(
    cluster: Cluster, server: StoreServer
) -> None:
    async with replicas(cluster, engines(), 2, shared=sharing(server)) as (one, other):
        await server.kill()
        name = (await respond(one, "hello")).json["id"]
        assert (await respond(one, "and", name)).status == 200
        assert (await respond(other, "and", name)).status == 404
        await serves_as_without(other, "in the meantime")
        await server.start()

        async def continues() -> bool:
            return (await respond(other, "and", name)).status == 200

        await until(continues)

        async def reachable() -> bool:
            return not await has_problem(other, "unreachable")

        await until(reachable)


async def test_a_store_that_does_not_answer_delays_only_who_looks_there(
    cluster: Cluster, server: StoreServer
) -> None:
    limited = sharing(server, timeout_ms=300.0)
    async with replicas(cluster, engines(), 2, shared=limited) as (one, other):
        server.freeze()
        try:
            name = (await respond(one, "hello")).json["id"]
            assert (await respond(one, "and", name)).status == 200
            assert (await respond(other, "and", name)).status == 404
            await shows(other, "slow")
        finally:
            server.thaw()


async def test_a_deletion_outlives_responses_that_the_queue_drops(
    cluster: Cluster, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = sharing(server, timeout_ms=300.0)
    async with (
        replicas(cluster, engines(), 1, shared=limited) as (one,),
        Redis(port=server.port) as store,
    ):
        name = (await respond(one, "hello")).json["id"]

        async def stored() -> int:
            return len([key async for key in store.scan_iter("ppd:response:*")])

        async def is_written() -> bool:
            return await stored() == 1

        await until(is_written)
        server.freeze()
        try:
            assert await send(one, "DELETE", name) == 200
            monkeypatch.setattr(responses, "_MAX_QUEUED_BYTES", 1)
            await respond(one, "beyond the bound")
            assert await one.metric("ppd_shared_responses_sent_total", result="dropped") == 1
        finally:
            server.thaw()

        async def is_deleted() -> bool:
            return await stored() == 0

        await until(is_deleted)


@pytest.mark.parametrize("key", ["", "5a", "xy" * 32])
async def test_a_key_that_is_none(cluster: Cluster, server: StoreServer, key: str) -> None:
    with pytest.raises(ConfigError, match="responses_key"):
        async with replicas(
            cluster, engines(), 1, shared=shared(server, responses=True, responses_key=key)
        ):
            pass


def test_a_key_without_the_option_is_an_error() -> None:
    given = SharedConfig("redis://host", responses_key=KEY)
    config = RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), shared=given)
    with pytest.raises(ConfigError, match="which is false"):
        config.check()


_TEXTS = st.text(max_size=20)


@given(_TEXTS, _TEXTS, st.tuples(st.binary(max_size=99), st.binary(max_size=99)))
def test_what_is_sealed_is_opened_by_its_tenant_and_name_only(
    tenant: str, name: str, parts: tuple[bytes, bytes]
) -> None:
    sealing = Sealing(bytes(32))
    sealed = sealing.seal(tenant, name, parts)
    assert sealing.open(tenant, name, sealed) == parts
    damaged = bytearray(sealed)
    damaged[secrets.randbelow(len(damaged))] ^= 1
    refused: list[Callable[[], object]] = [
        lambda: sealing.open(tenant + "x", name, sealed),
        lambda: sealing.open(tenant, name + "x", sealed),
        lambda: Sealing(b"x" * 32).open(tenant, name, sealed),
        lambda: sealing.open(tenant, name, bytes(damaged)),
        lambda: sealing.open(tenant, name, sealed[:5]),
    ]
    for call in refused:
        with pytest.raises(UnsealedError):
            call()
