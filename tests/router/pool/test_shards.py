"""A collection that is spread over several pools, some of which do not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.pool.config import PoolConfig

from .pools import ROWS, config_for, running


async def test_a_shard_that_is_down_is_left_out(data: Path, built: Path) -> None:
    """One shard has the new row, the other is lost in the middle; a third has a dead replica."""
    async with running(config_for(data)) as one:
        point = {"id": "only-here", "vector": ROWS[0].tolist()}
        await one.post("/v1/collections/docs/points", {"points": [point]})
        async with running(config_for(built)) as two:
            dead = "http://127.0.0.1:9"
            config = PoolConfig(shards=((one.url, dead), (dead, two.url)))
            async with running(config) as front:
                for _ in range(10):
                    status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
                    assert (status, reply["partial"]) == (200, False)
                    names = [hit["id"] for hit in reply["results"][0]["hits"]]
                    assert sorted(names) == sorted({"d0", "only-here", names[2]})  # each id once
                status, reply = await front.search(vector=[0.0])
                assert (status, "1 dimensions" in reply["error"]["message"]) == (400, True)
                lost = PoolConfig(shards=((one.url,), (dead,)))
                async with running(lost) as half:
                    status, reply = await half.search(vector=ROWS[0].tolist(), limit=3)
                    assert (status, reply["partial"], reply["missing"]) == (200, True, ["shard1"])
                    assert len(reply["results"][0]["hits"]) == 3
                    status, text = await half.get("/health")
                    assert status == 200
                    assert orjson.loads(text) == {
                        "status": "partial",
                        "shards": 2,
                        "missing": ["shard1"],
                    }
                    _, metrics = await half.get("/metrics")
                    ended = 'searches_total{ending="deadline",stage="prefill"} 1.0'
                    assert ended in metrics  # what is not whole is degraded
                none = PoolConfig(shards=((dead,),))
                async with running(none) as nobody:
                    status, reply = await nobody.search(vector=ROWS[0].tolist())
                    assert (status, reply["error"]["message"]) == (503, "no shard answers: shard0")
                    assert (await nobody.get("/health"))[0] == 503


async def test_a_replica_that_hangs_leaves_time_for_the_next(built: Path) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("nobody wakes it")

    app = web.Application()
    app.router.add_post("/{path:.*}", hang)
    async with running(config_for(built)) as one, TestServer(app) as hung:
        config = PoolConfig(shards=((str(hung.make_url("")), one.url),), default_timeout_ms=6000.0)
        async with running(config) as front:
            for _ in range(20):
                status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
                assert (status, reply["partial"]) == (200, False)
            _, metrics = await front.get("/metrics")
    assert 'ppd_pool_shard_failures_total{shard="shard0"} 1.0' in metrics


async def test_shards_that_are_full_say_when_to_come_again(built: Path) -> None:
    """A full replica is not a broken one: the other of its shard is asked, and nobody blamed."""

    async def full(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "full"}}, status=429)

    app = web.Application()
    app.router.add_post("/{path:.*}", full)
    async with running(config_for(built)) as one, TestServer(app) as busy:
        url = str(busy.make_url(""))
        async with running(PoolConfig(shards=((url, one.url),))) as front:
            for _ in range(10):
                status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
                assert (status, reply["partial"]) == (200, False)
            assert "shard_failures_total{" not in (await front.get("/metrics"))[1]
        config = PoolConfig(shards=((one.url,), (url,)))
        async with running(config) as front:
            status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
            assert (status, reply["missing"]) == (200, ["shard1"])
        async with running(PoolConfig(shards=((url,),))) as front:
            path, body = "/v1/collections/docs/search", orjson.dumps({"vector": [0.0]})
            status, _, headers = await front.raw(path, body)
            assert (status, headers["Retry-After"]) == (429, "1")


async def test_a_shard_without_the_collection_is_missing_and_two_are_an_error(
    built: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    async with running(config_for(built)) as one, running(config_for(tmp_path / "empty")) as none:
        async with running(PoolConfig(shards=((one.url,), (none.url,)))) as front:
            status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
            assert (status, reply["partial"], reply["missing"]) == (200, True, ["shard1"])
        async with running(PoolConfig(shards=((one.url, none.url),))) as front:
            for _ in range(10):
                status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
                assert (status, reply["partial"]) == (200, False)
        async with running(PoolConfig(shards=((none.url,), (none.url,)))) as front:
            status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
            assert (status, reply["error"]["message"]) == (404, "there is no collection 'docs'")


async def test_a_search_for_a_missing_collection_takes_no_replica_out_of_service(
    built: Path,
) -> None:
    async with (
        running(config_for(built)) as one,
        running(PoolConfig(shards=((one.url,),))) as front,
    ):
        status, _ = await front.post("/v1/collections/other/search", {"vector": [0.0]})
        assert status == 404
        status, reply = await front.search(vector=ROWS[0].tolist(), limit=3)
        assert (status, reply["partial"]) == (200, False)
        assert "shard_failures_total{" not in (await front.get("/metrics"))[1]


async def test_a_shard_that_hangs_costs_one_search_its_time_and_none_after_it(
    built: Path,
) -> None:
    asked = 0

    async def hang(request: web.Request) -> web.Response:
        nonlocal asked
        asked += request.method == "POST"
        await asyncio.Event().wait()
        raise AssertionError("nobody wakes it")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang)
    async with running(config_for(built)) as one, TestServer(app) as hung:
        shards = ((one.url,), (str(hung.make_url("")),))
        async with running(PoolConfig(shards=shards, shard_slack_s=0.2)) as front:
            for _ in range(20):
                body = {"vector": ROWS[0].tolist(), "limit": 3, "timeout_ms": 300}
                status, reply = await front.search(**body)
                assert (status, reply["missing"]) == (200, ["shard1"])
                assert len(reply["results"][0]["hits"]) == 3
            assert asked == 1
            status, reply = await front.search(vector=ROWS[0].tolist(), timeout_ms=-1)
            assert (status, "timeout_ms" in reply["error"]["message"]) == (400, True)


async def test_every_pool_hears_the_feedback(built: Path, data: Path) -> None:
    dead = "http://127.0.0.1:9"
    async with running(config_for(built)) as one, running(config_for(data)) as two:
        async with running(PoolConfig(shards=((one.url, dead), (two.url,)))) as front:
            body = {"kv_link_use": 1.0, "token_ms": 20.0, "decode_wait_p95_ms": 500.0}
            assert await front.post("/v1/feedback", body) == (200, {"shards": 2, "accepted": 2})
            for pool in (one, two):
                _, metrics = await pool.get("/metrics")
                assert "ppd_pool_reserved_share 0.9" not in metrics
        async with running(PoolConfig(shards=((dead,),))) as front:
            assert (await front.post("/v1/feedback", body))[0] == 503
