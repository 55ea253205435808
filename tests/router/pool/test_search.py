"""Searches over real sockets, and everything that can be wrong with them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from ppd.ann.schedule import Bounds, Controls
from ppd.errors import ConfigError
from router.pool.config import Device
from router.pool.filters import Filter

from .pools import COUNT, ROWS, WIDTH, config_for, embedding, exact, running


async def test_one_many_and_binary_find_the_same(data: Path) -> None:
    queries = ROWS[:40] + np.float32(0.01)
    async with running(config_for(data)) as pool:
        singles = [await pool.ids(query, limit=5, params={"itopk": 64}) for query in queries]
        status, reply = await pool.search(
            vectors=queries.tolist(), limit=5, params={"itopk": 64}, stage="decode"
        )
        assert status == 200
        assert [[hit["id"] for hit in one["hits"]] for one in reply["results"]] == singles
        same = sum(a == b for a, b in zip(singles, exact(queries, 5), strict=True))
        assert same >= 38
        hit = reply["results"][0]["hits"][0]
        assert hit["text"] == "text 0"
        assert hit["metadata"] == {"year": 2000, "lang": "fr"}
        assert hit["score"] == pytest.approx(24 * 0.01**2, rel=1e-2)

        head = struct.pack("<4sIIIIIf", b"PPDQ", 40, WIDTH, 5, 64, 0, 0.0)
        path = "/v1/collections/docs/"
        kind = "application/octet-stream"
        _, data_back, _ = await pool.raw(path + "search", head + queries.tobytes(), kind)
        assert struct.unpack_from("<4sII", data_back) == (b"PPDR", 40, 5)
        keys = np.frombuffer(data_back, np.int64, 200, 12).tolist()
        _, rows = await pool.post(path + "payloads", {"keys": keys})
        assert [rows["rows"][str(key)]["id"] for key in keys] == [
            name for row in singles for name in row
        ]


@pytest.mark.parametrize(
    ("condition", "passing"),
    [
        ({"gte": 2020}, [2021]),
        ({"gt": 1.5}, [7, 2021]),
        ({"lt": 2020}, [7]),
        ({"lte": "2"}, ["1999"]),
        ({"gt": "1"}, ["1999", "new"]),
    ],
)
def test_a_number_is_neither_more_nor_less_than_a_text(
    condition: dict[str, Any], passing: list[int | str]
) -> None:
    wanted = Filter.parse({"year": condition})
    assert wanted is not None
    where, values = wanted.sql()
    with closing(sqlite3.connect(":memory:")) as rows:
        rows.execute("create table rows (metadata text)")
        for year in (7, 2021, "1999", "new", None):
            rows.execute("insert into rows values (?)", (json.dumps({"year": year}),))
        found = rows.execute(f"select metadata from rows where {where}", values).fetchall()
    assert [json.loads(row)["year"] for (row,) in found] == passing


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"year": {"gte": 2005, "lt": 2020}}, [i for i in range(COUNT) if 5 <= i % 25 < 20]),
        ({"lang": "fr"}, [i for i in range(COUNT) if i % 100 == 0]),
        (
            {"year": {"in": [2001, 2002]}, "lang": {"ne": "fr"}},
            [i for i in range(COUNT) if i % 25 in (1, 2) and i % 100],
        ),
    ],
)
async def test_filters_keep_recall(data: Path, wanted: dict[str, Any], allowed: list[int]) -> None:
    queries = ROWS[:30] + np.float32(0.01)
    async with running(config_for(data)) as pool:
        found = [await pool.ids(query, limit=10, filter=wanted) for query in queries]
    hits = sum(
        len(set(a) & set(b)) for a, b in zip(found, exact(queries, 10, allowed), strict=True)
    )
    assert hits >= 0.98 * 300
    assert {one for row in found for one in row} <= {f"d{i}" for i in allowed}


async def test_a_deadline_that_passes_gives_what_there_is(data: Path) -> None:
    async with running(config_for(data, threads=1)) as pool:
        status, reply = await pool.search(
            vectors=[[0.0] * WIDTH] * 500, limit=10, timeout_ms=0.001, params={"itopk": 1024}
        )
        assert status == 200
        assert sum(one["degraded"] for one in reply["results"]) == 500
        _, metrics = await pool.get("/metrics")
        assert 'ppd_pool_searches_total{ending="deadline",stage="prefill"} 500.0' in metrics


async def test_a_full_queue_answers_with_retry_after(data: Path) -> None:
    config = config_for(data, bounds=Bounds(prefill=10, decode=10), threads=1)
    async with running(config) as pool:
        vectors = [[0.0] * WIDTH] * 10
        body = b'{"vectors": %s, "params": {"itopk": 1024}}' % str(vectors).encode()
        path = "/v1/collections/docs/search"
        answers = await asyncio.gather(*(pool.raw(path, body) for _ in range(20)))
        refused = [headers for status, _, headers in answers if status == 429]
        assert refused
        assert {status for status, _, _ in answers} == {200, 429}
        assert all(int(headers["Retry-After"]) >= 1 for headers in refused)
        assert len(await pool.ids(ROWS[0])) == 10


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"vector": [1.0] * 5}, 400, "5 dimensions; the collection has 24"),
        ({"vector": []}, 400, "empty"),
        ({"vectors": [[1.0], [1.0, 2.0]]}, 400, "one dimension"),
        ({"vector": ["a"]}, 400, "body is wrong"),
        ({}, 400, "one of vector"),
        ({"vector": [0.0] * 24, "text": "x"}, 400, "one of vector"),
        ({"text": "x"}, 400, "embeddings_url"),
        ({"vector": [0.0] * 24, "limit": 65, "params": {"itopk": 64}}, 400, "above params.itopk"),
        ({"vector": [0.0] * 24, "limit": 0}, 400, "limit must be"),
        ({"vector": [0.0] * 24, "params": {"itopk": 9999}}, 400, "itopk must be"),
        ({"vector": [0.0] * 24, "timeout_ms": -1}, 400, "timeout_ms"),
        ({"vector": [0.0] * 24, "stage": "later"}, 400, "body is wrong"),
        ({"vector": [0.0] * 24, "nonsense": 1}, 400, "nonsense"),
        ({"vector": [0.0] * 24, "filter": {"a": {"like": "x"}}}, 400, "like"),
        ({"vector": [0.0] * 24, "filter": {"a' or 1=1": 2}}, 400, "no field"),
        ({"vector": [0.0] * 24, "filter": {"a": 2**64}}, 400, "more than 64 bits"),
        ({"vectors": [[0.0] * 24] * 2049}, 400, "2049 queries at once, 2048 may wait"),
    ],
)
async def test_a_wrong_search_is_answered_with_what_is_wrong(
    built: Path, body: dict[str, Any], status: int, says: str
) -> None:
    async with running(config_for(built)) as pool:
        got, reply = await pool.search(**body)
        assert (got, says in reply["error"]["message"]) == (status, True), reply


async def test_other_wrong_requests(built: Path) -> None:
    async with running(config_for(built)) as pool:
        got, reply = await pool.post("/v1/collections/nope/search", {"vector": [0.0]})
        assert (got, reply["error"]["message"]) == (404, "there is no collection 'nope'")
        nan = b'{"vector": [%s]}' % b",".join([b"1e999"] * 24)
        path = "/v1/collections/docs/search"
        assert (await pool.raw(path, nan))[0] == 400
        binary = struct.pack("<4sIIIIIf", b"PPDQ", 1, WIDTH, 5, 64, 0, 0.0)
        values = np.full(WIDTH, np.nan, np.float32).tobytes()
        kind = "application/octet-stream"
        assert b"not finite" in (await pool.raw(path, binary + values, kind))[1]
        assert (await pool.raw(path, binary + values[:-4], kind))[0] == 400
        for body in ({"kv_link_use": 2}, {"kv_link_use": 0, "token_ms": 0}):
            assert (await pool.post("/v1/feedback", body))[0] == 400


async def test_a_missing_gpu_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = config_for(data, device=Device.CUDA)
    assert (config.engines, config.step_shape.slots) == (1, 1024)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        async with running(config):
            pass


@pytest.mark.parametrize(
    ("link", "decode_ms", "move", "change"),
    [
        (0.2, 100.0, "link_free", 1),
        (1.0, 100.0, "link_full", -1),
        (1.0, 9.0, "steady", 0),
    ],
)
async def test_feedback_moves_the_reservation(
    built: Path, link: float, decode_ms: float, move: str, change: int
) -> None:
    async with running(config_for(built, controls=Controls(0.5))) as pool:
        seen = {"kv_link_use": link, "token_ms": 20.0, "decode_wait_p95_ms": decode_ms}
        _, reply = await pool.post("/v1/feedback", seen)
        assert reply["move"] == move
        assert (reply["reserved"] > 0.5) - (reply["reserved"] < 0.5) == change
        _, metrics = await pool.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
        assert float(lines["ppd_pool_reserved_share"]) == reply["reserved"]
        assert (await pool.get("/health"))[0] == 200


async def test_text_is_embedded_by_a_server(built: Path) -> None:
    """And one that answers nonsense, or not at all, is named."""
    wrong: list[web.Response] = []
    async with embedding(lambda text: ROWS[int(text)], wrong) as url:
        config = config_for(built, embeddings_url=url)
        async with running(config) as pool:
            status, reply = await pool.search(texts=["7", "300"], limit=1)
            assert status == 200
            assert [one["hits"][0]["id"] for one in reply["results"]] == ["d7", "d300"]
            for answer, says in (
                (web.Response(status=500), "answered 500"),
                (web.json_response({"data": []}), "gave 0 vectors for 1 texts"),
                (web.Response(text="{"), url),
            ):
                wrong.append(answer)
                status, reply = await pool.search(text="7")
                assert status == 503
                assert says in reply["error"]["message"]
    async with running(config) as pool:
        status, reply = await pool.search(text="7")
        assert (status, url in reply["error"]["message"]) == (503, True)
