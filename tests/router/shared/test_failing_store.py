"""A shared store that fails: one line in the log, a metric, a mark, and requests as without it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from eval.cluster import free_port
from eval.store_server import StoreServer
from ppd.errors import ConfigError
from ppd.shared_records import FORMAT
from router.config.options import RouterConfig
from router.config.shared import SharedConfig
from router.server.check import check_everything

from ..conftest import Client, Cluster
from ..fixtures import serving, until
from .conftest import NewServer, shared
from .test_sharing import engines, knows, replicas, turns

LOGGER = "ppd.router.shared"


async def has_problem(router: Client, kind: str) -> bool:
    return await router.metric("ppd_shared_problem", kind=kind) == 1


async def shows(router: Client, kind: str) -> None:
    """Wait until the metrics and the dashboard show a problem."""

    async def holds() -> bool:
        return await has_problem(router, kind)

    await until(holds)
    assert await router.metric("ppd_fallback", kind="not_shared") >= 1
    async with router.http.get(f"{router.url}/dashboard/state") as answer:
        assert kind in (await answer.json())["store_problems"]


async def works(router: Client) -> None:
    async def holds() -> bool:
        return await router.metric("ppd_fallback", kind="not_shared") == 0

    await until(holds)


async def serves_as_without(router: Client, text: str) -> None:
    """A conversation of this router: a remote turn, then local ones."""
    first = await router.chat(text)
    assert first.route == ("remote", "first_turn")
    second = await router.chat(text, "www", "and")
    assert second.route == ("local", "policy_full")


def lines(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and f"({kind}:" in record.getMessage()
    ]


def recoveries(caplog: pytest.LogCaptureFixture) -> int:
    return sum("works again" in r.getMessage() for r in caplog.records if r.name == LOGGER)


async def test_a_store_that_is_not_there(
    cluster: Cluster, new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The router starts, serves, and shares as soon as the store is there."""
    server = new_server()
    caplog.set_level(logging.INFO, LOGGER)
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        await shows(one, "unreachable")
        for i in range(5):
            await serves_as_without(one, f"hello {i}")
        assert len(lines(caplog, "unreachable")) == 2, "one of each router"
        async with server.running():
            await works(one)
            await works(other)
            await knows(other, 10)  # what was queued has been written
            assert recoveries(caplog) == 2


async def test_a_store_that_is_killed_and_restarted_empty(
    cluster: Cluster, new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server()
    caplog.set_level(logging.INFO, LOGGER)
    async with (
        serving(*(workers := engines())),
        server.running(),
        replicas(cluster, workers, 2, shared=shared(server)) as (one, other),
    ):
        await one.chat("hello")
        await knows(other, 1)
        await server.kill()
        await shows(one, "unreachable")
        await serves_as_without(one, "in the meantime")
        await server.start()
        for router in (one, other):
            await shows(router, "emptied")
        assert len(lines(caplog, "emptied")) == 2
        assert len(lines(caplog, "unreachable")) == 2
        await knows(other, 3)
        assert (await other.chat("hello", "www", "and")).route == ("local", "policy_full")
        async with replicas(cluster, workers, 1, shared=shared(server)) as (late,):
            assert await turns(late) >= 2, "those that were written afterwards"


async def test_a_store_that_is_flushed(
    cluster: Cluster, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        await one.chat("hello")
        await knows(other, 1)
        async with Redis(port=server.port) as store:
            await store.flushall()
        for router in (one, other):
            await shows(router, "emptied")
        await one.chat("another")
        await knows(other, 2)
        assert len(lines(caplog, "emptied")) == 2


async def test_a_store_that_no_longer_answers(
    cluster: Cluster, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The connections stay open, as behind a network that drops all packets."""
    limited = shared(server, timeout_ms=2_000.0)
    async with replicas(cluster, engines(), 2, shared=limited) as (one, other):
        await one.chat("hello")
        await knows(other, 1)
        server.freeze()
        try:
            for i in range(20):
                async with asyncio.timeout(1.9):  # no request waits for the store
                    await serves_as_without(one, f"frozen {i}")
            await shows(one, "slow")
            assert len(lines(caplog, "slow")) <= 2
        finally:
            server.thaw()
        await works(one)
        await knows(other, 41)
        assert not lines(caplog, "emptied")


async def test_a_router_starts_although_the_store_does_not_answer(
    cluster: Cluster, server: StoreServer
) -> None:
    limited = shared(server, timeout_ms=300.0, catch_up_s=60.0)
    server.freeze()
    try:
        async with (
            asyncio.timeout(30),
            replicas(cluster, engines(), 1, shared=limited) as (one,),
        ):
            await shows(one, "slow")
            await serves_as_without(one, "hello")
    finally:
        server.thaw()


async def test_connections_that_are_cut(
    cluster: Cluster, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost: both sides go on where they stopped."""
    async with replicas(cluster, engines(), 2, shared=shared(server)) as (one, other):
        for i in range(10):
            await one.chat(f"hello {i}")
            async with Redis(port=server.port) as store:
                await store.client_kill_filter(_type="normal", skipme=True)
        await knows(other, 10)
        await works(one)
        await works(other)
        assert not lines(caplog, "emptied")


async def test_a_store_whose_memory_is_full(
    cluster: Cluster, new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    workers = engines()
    async with (
        new_server("--maxmemory-policy", "noeviction").running() as server,
        replicas(cluster, workers, 2, shared=shared(server)) as (one, other),
    ):
        await one.chat("hello")
        await knows(other, 1)
        async with Redis(port=server.port) as store:
            await store.config_set("maxmemory", "1")
            for i in range(5):
                await serves_as_without(one, f"full {i}")
            await shows(one, "full")
            assert await turns(other) == 1
            assert len(lines(caplog, "full")) <= 2
            async with replicas(cluster, workers, 1, shared=shared(server)) as (late,):
                await knows(late, 1)  # it is read although nothing can be written
            await store.config_set("maxmemory", "0")
        await works(one)
        await knows(other, 11)


async def test_records_beyond_the_bound_are_removed(cluster: Cluster, server: StoreServer) -> None:
    options = shared(server, max_bytes=20_000)
    async with (
        replicas(cluster, engines(), 1, shared=options) as (one,),
        Redis(port=server.port) as store,
    ):
        for i in range(200):
            await one.chat(f"hello {i}")

        async def shrunk() -> bool:
            size = await store.memory_usage("ppd:turns") or 0
            return 0 < size <= 20_000 and await store.xlen("ppd:turns") > 0

        await until(shrunk)


async def test_a_queue_that_is_full_drops_the_oldest(
    cluster: Cluster, new_server: NewServer
) -> None:
    server = new_server()
    options = shared(server, queue_records=10)
    async with replicas(cluster, engines(), 2, shared=options) as (one, other):
        for i in range(30):
            await one.chat(f"hello {i}")
        assert await one.metric("ppd_shared_records_sent_total", result="dropped") == 20
        assert await one.metric("ppd_shared_queue") == 10
        async with server.running():
            await knows(other, 10)
            assert await turns(other) == 10
            newest = await other.chat("hello 29", "www", "and")
            assert newest.route == ("local", "policy_full")


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--requirepass", "right"), {}),
        (("--requirepass", "right"), {"password": "wrong"}),
        (("--user", "router", "on", ">right", "~other:*", "+@all"), {"username": "router"}),
        (("--requirepass", "right"), {"password_file": "/nowhere/password"}),
    ],
)
async def test_a_store_that_refuses_the_user(
    cluster: Cluster,
    new_server: NewServer,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    if "username" in options:
        options = {**options, "password": "right"}
    async with (
        new_server(*flags).running() as server,
        replicas(cluster, engines(), 1, shared=shared(server, **options)) as (one,),
    ):
        await shows(one, "unauthenticated")
        for i in range(3):
            await serves_as_without(one, f"hello {i}")
        assert len(lines(caplog, "unauthenticated")) == 1
        assert "right" not in caplog.text
        assert "wrong" not in caplog.text


async def test_a_new_password_is_read_without_a_restart(
    cluster: Cluster, new_server: NewServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    async with new_server("--requirepass", "new").running() as server:
        options = shared(server, password_file=str(file))
        async with replicas(cluster, engines(), 2, shared=options) as (one, other):
            await shows(one, "unauthenticated")
            file.write_text("new")
            await works(one)
            await one.chat("hello")
            await knows(other, 1)


async def test_a_server_without_a_command(
    cluster: Cluster, new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without streams (before Redis 5) refuses XADD and XREAD."""
    flags = ("--rename-command", "XADD", "", "--rename-command", "XREAD", "")
    async with (
        new_server(*flags).running() as server,
        replicas(cluster, engines(), 1, shared=shared(server)) as (one,),
    ):
        await shows(one, "refused")
        await serves_as_without(one, "hello")
        assert len(lines(caplog, "refused")) == 1


async def test_a_key_of_another_type(
    cluster: Cluster, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis(port=server.port) as store:
        await store.set("ppd:turns", "something else")
        async with replicas(cluster, engines(), 1, shared=shared(server)) as (one,):
            await shows(one, "refused")
            await serves_as_without(one, "hello")
            assert len(lines(caplog, "refused")) == 1
            assert await store.get("ppd:turns") == b"something else"


async def test_a_server_that_is_a_replica_takes_no_writes(
    cluster: Cluster, new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--replicaof", "127.0.0.1", str(free_port()))
    async with (
        new_server(*flags).running() as server,
        replicas(cluster, engines(), 1, shared=shared(server)) as (one,),
    ):
        await shows(one, "read_only")
        await serves_as_without(one, "hello")
        assert len(lines(caplog, "read_only")) == 1


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (bytes([FORMAT + 1]) + b"of a later version", "foreign_format"),
        (b"\x00", "foreign_format"),
        (bytes([FORMAT]) + b"\xff\xff", "malformed"),
        (b"", "malformed"),
    ],
)
async def test_records_that_cannot_be_read(
    cluster: Cluster,
    server: StoreServer,
    caplog: pytest.LogCaptureFixture,
    batch: bytes,
    kind: str,
) -> None:
    """They are skipped, and those of this version are taken: replicas are updated one by one."""
    async with (
        replicas(cluster, engines(), 2, shared=shared(server)) as (one, other),
        Redis(port=server.port) as store,
    ):
        for _ in range(50):
            await store.xadd("ppd:turns", {"o": "another", "b": batch})
        await one.chat("hello")
        await knows(other, 1)
        for router in (one, other):
            await shows(router, kind)
            unreadable = await router.metric("ppd_shared_batches_unreadable_total", reason=kind)
            assert unreadable == 50
        assert len(lines(caplog, kind)) == 2
        assert (await other.chat("hello", "www", "and")).route == ("local", "policy_full")


async def test_an_entry_of_another_program_is_malformed(
    cluster: Cluster, server: StoreServer
) -> None:
    async with (
        replicas(cluster, engines(), 1, shared=shared(server)) as (one,),
        Redis(port=server.port) as store,
    ):
        await store.xadd("ppd:turns", {"something": "else"})
        await shows(one, "malformed")
        await serves_as_without(one, "hello")


async def test_a_certificate_that_is_not_trusted(
    cluster: Cluster, new_server: NewServer, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    port = free_port()
    flags = (
        *("--tls-port", str(port), "--tls-cert-file", str(file), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(file), "--tls-auth-clients", "no"),
    )
    async with new_server(*flags).running() as server:
        url = f"rediss://127.0.0.1:{port}"
        trusting = shared(server, url=url, ca_file=str(file))
        async with serving(*(workers := engines())):
            async with replicas(cluster, workers, 2, shared=trusting) as (one, other):
                await one.chat("hello")
                await knows(other, 1)
            async with replicas(cluster, workers, 1, shared=shared(server, url=url)) as (one,):
                await shows(one, "unreachable")
                await serves_as_without(one, "another")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://host"}, "must begin with redis://"),
        ({"url": "redis://user:word@host"}, "must have no user"),
        ({"url": "redis://"}, "must name a host"),
        ({"url": "unix://"}, "must name a socket"),
        ({"url": "redis://host/name"}, "the number of a database"),
        ({"url": "redis://host?db=1"}, "must have no query"),
        ({"url": "redis://host:0x1"}, "shared.url"),
        ({"prefix": ""}, "1..64 characters"),
        ({"prefix": "a b"}, "printable ASCII"),
        ({"password": "a", "password_file": "b"}, "exclude each other"),
        ({"ca_file": "ca.pem"}, "rediss://"),
        ({"timeout_ms": 0.0}, "shared.timeout_ms must be above 0"),
        ({"queue_records": 0}, "shared.queue_records must be above 0"),
        ({"max_bytes": -1}, "shared.max_bytes must be above 0"),
        ({"ttl_s": 0.0}, "shared.ttl_s must be above 0"),
        ({"catch_up_s": -1.0}, "shared.catch_up_s must be 0 or more"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    given = SharedConfig(**{"url": "redis://host:6379", **options})
    config = RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), shared=given)
    with pytest.raises(ConfigError, match=message) as caught:
        config.check()
    assert "word" not in str(caught.value).replace("password", "")


def test_without_the_client_library_the_message_names_it() -> None:
    program = """
import asyncio, sys
sys.modules["redis"] = None
from router.config.options import RouterConfig
from router.config.shared import SharedConfig
from router.observability.metrics import Metrics
from router.server.sharing import make_sharing
make_sharing(RouterConfig(shared=SharedConfig("redis://host")), None, Metrics(), None)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "pip install '.[shared]' in a checkout of sglang-ppd" in ended.stderr


def test_a_check_of_the_configuration_finds_files_and_keys() -> None:
    given = SharedConfig("redis://host", password_file="/nowhere/password", responses=True)
    config = RouterConfig(policy="full", prefill=("http://p:1",), decode=("http://d:1",))
    check_everything(config)
    with pytest.raises(ConfigError) as caught:
        check_everything(msgspec.structs.replace(config, shared=given))
    assert "shared.password_file" in str(caught.value)
    assert "shared.responses needs responses_key" in str(caught.value)
