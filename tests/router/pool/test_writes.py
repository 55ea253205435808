"""Rows come, go and are moved while others search."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppd.ann.growth import Growth
from ppd.ann.space import Rows
from router.pool.writes import MAX_WRITES

from ...disks import disk_of
from .pools import COUNT, ROWS, WIDTH, Client, config_for, embedding, running


async def test_what_is_written_is_found_and_survives_restart_and_rebuild(data: Path) -> None:
    async with running(config_for(data)) as pool:
        point = {"id": "new", "vector": [9.0] * WIDTH, "text": "t", "metadata": {"year": 1}}
        moved = {"id": "d3", "vector": [-9.0] * WIDTH}
        status, reply = await pool.post("/v1/collections/docs/points", {"points": [point, moved]})
        assert (status, reply) == (200, {"upserted": 2})
        _, reply = await pool.post("/v1/collections/docs/delete", {"ids": ["d4", "nobody"]})
        assert reply == {"deleted": 1}

    async def holds(pool: Client) -> None:
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"
        assert (await pool.ids(np.full(WIDTH, -9.0)))[0] == "d3"
        assert "d3" not in await pool.ids(ROWS[3], limit=50)
        assert "d4" not in await pool.ids(ROWS[4], limit=50)
        assert await pool.ids(np.full(WIDTH, 0.0), filter={"year": 1}) == ["new"]

    async with running(config_for(data)) as pool:
        await holds(pool)
        status, reply = await pool.post("/v1/collections/docs/rebuild", {})
        assert (status, reply["rows"]) == (200, COUNT)
        await holds(pool)
    assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000002.ann"]
    async with running(config_for(data)) as pool:
        await holds(pool)


async def test_what_is_replaced_is_there_until_its_successor_is(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that take long to enter the graph keep nobody from finding, with a filter or without."""
    reached, gate = threading.Event(), threading.Event()
    added = Growth.add

    def held(*args: Any, **kwargs: Any) -> None:
        added(*args, **kwargs)
        reached.set()
        assert gate.wait(20.0)

    monkeypatch.setattr(Growth, "add", held)
    all_old = {"year": {"lt": 10**6}}
    async with running(config_for(data)) as pool:
        points = [{"id": f"d{i}", "vector": [9.0] * WIDTH} for i in range(100)]
        posting = asyncio.create_task(pool.post("/v1/collections/docs/points", {"points": points}))
        try:
            assert await asyncio.to_thread(reached.wait, 20.0)
            for i in (0, 50, 99):
                assert (await pool.ids(ROWS[i], limit=1)) == [f"d{i}"]
                found = await pool.ids(ROWS[i], limit=1, filter=all_old)
                assert found == [f"d{i}"]
        finally:
            gate.set()
        assert (await posting)[0] == 200
        assert set(await pool.ids(np.full(WIDTH, 9.0), limit=100)) == {one["id"] for one in points}
        assert "d50" not in await pool.ids(ROWS[50], limit=50)


async def test_a_full_disk_refuses_rows_and_serves_on(data: Path) -> None:
    async with running(config_for(data)) as pool:
        points = [{"id": f"n{i}", "vector": [9.0] * WIDTH, "text": "x" * 500} for i in range(1000)]
        size = max(path.stat().st_size for path in (data / "docs").iterdir())
        with disk_of(size + 100_000):
            status, reply = await pool.post("/v1/collections/docs/points", {"points": points})
        assert status == 503
        assert "rows.sqlite: " in reply["error"]["message"]
        assert "rollback" not in reply["error"]["message"]
        assert f'"rows":{COUNT}' in (await pool.get("/v1/collections/docs"))[1]
        assert (await pool.ids(ROWS[5]))[0] == "d5"
        status, _ = await pool.post("/v1/collections/docs/points", {"points": points[:5]})
        assert status == 200
    async with running(config_for(data)) as pool:
        assert f'"rows":{COUNT + 5}' in (await pool.get("/v1/collections/docs"))[1]


async def test_a_damaged_collection_is_left_out(data: Path) -> None:
    shutil.copytree(data / "docs", data / "broken")
    with (data / "broken" / "index-000001.ann").open("r+b") as file:
        file.write(b"something else")
    (data / "docs" / "index-000002.ann").write_bytes(b"of a rebuild that was killed")
    async with running(config_for(data)) as pool:
        assert (await pool.ids(ROWS[5]))[0] == "d5"
        status, reply = await pool.post("/v1/collections/broken/search", {"vector": [0.0]})
        assert (status, reply["error"]["code"]) == (404, None)
    assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000001.ann"]


async def test_what_has_no_direction_has_no_cosine(tmp_path: Path) -> None:
    path = "/v1/collections/turned"
    async with running(config_for(tmp_path)) as pool:
        await pool.put(path, {"dimensions": 2})
        points = [{"id": "a", "vector": [1.0, 0.0]}, {"id": "b", "vector": [0.0, -0.0]}]
        status, reply = await pool.post(f"{path}/points", {"points": points})
        assert (status, reply["error"]["message"]) == (
            400,
            "points: number 1 is all zeros, which has no cosine",
        )
        assert (await pool.post(f"{path}/points", {"points": points[:1]}))[0] == 200
        status, reply = await pool.post(f"{path}/search", {"vector": [0.0, 0.0]})
        assert (status, reply["error"]["param"]) == (400, "vector")
        _, reply = await pool.post(f"{path}/search", {"vector": [2.0, 0.0]})
        assert reply["results"][0]["hits"][0]["score"] == pytest.approx(1.0)


def indexed(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "rows.sqlite")) as db:
        found = db.execute("select name from sqlite_master where name like 'by %'").fetchall()
    return {name for (name,) in found}


async def test_too_many_writes_are_answered_with_retry_after(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, added = threading.Event(), Growth.add

    def held(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(20.0)
        added(*args, **kwargs)

    monkeypatch.setattr(Growth, "add", held)
    async with running(config_for(data)) as pool:

        async def write(number: int) -> tuple[int, Any]:
            point = {"id": f"w{number}", "vector": [9.0] * WIDTH}
            return await pool.post("/v1/collections/docs/points", {"points": [point]})

        first = [asyncio.create_task(write(i)) for i in range(MAX_WRITES + 5)]
        try:
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 5:
                more, _ = await asyncio.wait(set(first) - done, return_when=asyncio.FIRST_COMPLETED)
                done |= more
        finally:
            gate.set()
        statuses = [status for status, _ in await asyncio.gather(*first)]
        assert (statuses.count(200), statuses.count(429)) == (MAX_WRITES, 5)


async def test_a_collection_begins_empty_and_takes_text(tmp_path: Path) -> None:
    point = "/v1/collections/notes"

    def vectors(text: str) -> Rows:
        row: Rows = ROWS[int(text) if text.isdecimal() else 0]
        return row

    async with embedding(vectors, []) as url:
        config = config_for(tmp_path, embeddings_url=url)
        async with running(config) as pool:
            wanted = {"metric": "l2", "indexed": ["owner"]}
            status, reply = await pool.put(point, wanted)
            assert (status, reply["rows"], reply["dimensions"]) == (201, 0, WIDTH)
            assert (await pool.put(point, {**wanted, "indexed": ["at"]}))[0] == 200
            assert indexed(tmp_path / "notes") == {"by owner", "by at"}
            assert (await pool.put(point, {"dimensions": 3}))[0] == 409
            status, reply = await pool.post(f"{point}/search", {"text": "3"})
            assert (status, reply["results"]) == (200, [{"hits": [], "degraded": False}])
            points = [
                {"id": f"n{i}", "text": str(i), "metadata": {"owner": f"o{i % 3}", "at": i}}
                for i in range(30)
            ]
            points.append({"id": "given", "vector": ROWS[99].tolist()})
            assert await pool.post(f"{point}/points", {"points": points}) == (
                200,
                {"upserted": 31},
            )
        async with running(config) as pool:  # started again
            body = {"texts": ["7", "99"], "limit": 1}
            _, reply = await pool.post(f"{point}/search", body)
            assert [one["hits"][0]["id"] for one in reply["results"]] == ["n7", "given"]
            body = {"text": "7", "limit": 50, "filter": {"owner": "o0"}}
            _, reply = await pool.post(f"{point}/search", body)
            assert len(reply["results"][0]["hits"]) == 10
            gone = {"filter": {"at": {"lt": 20}}}
            assert await pool.post(f"{point}/delete", gone) == (200, {"deleted": 20})
            _, reply = await pool.post(f"{point}/search", {"text": "7", "limit": 50})
            assert len(reply["results"][0]["hits"]) == 11


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("-x", {"dimensions": 3}, "is no name"),
        ("..%2Fx", {"dimensions": 3}, "is no name"),
        ("a", {"dimensions": 0}, "dimensions must be"),
        ("a", {"dimensions": 3, "metric": "ip"}, "longest row"),
        ("a", {}, "embeddings_url"),
        ("a", {"dimensions": 3, "indexed": ["x' y"]}, "no field"),
    ],
)
async def test_a_collection_that_cannot_be(
    tmp_path: Path, path: str, body: dict[str, Any], says: str
) -> None:
    async with running(config_for(tmp_path)) as pool:
        status, reply = await pool.put(f"/v1/collections/{path}", body)
        assert (status, says in reply["error"]["message"]) == (400, True), reply
        assert (await pool.get("/v1/collections"))[1] == '{"collections":[]}'


@pytest.mark.parametrize(
    ("call", "body", "says"),
    [
        ("points", {"points": [{"id": "a", "text": "x"}]}, "embeddings_url"),
        ("points", {"points": [{"id": "a"}]}, "neither vector nor text"),
        ("points", {"points": []}, "1 to 10000 points"),
        ("points", {"points": [{"id": "a", "vector": [1.0]}] * 2}, "comes twice"),
        ("delete", {}, "one of ids and filter"),
        ("delete", {"filter": {}}, "one of ids and filter"),
        ("delete", {"ids": ["d1"], "filter": {"year": 2000}}, "one of ids and filter"),
    ],
)
async def test_wrong_writes_change_nothing(
    built: Path, call: str, body: dict[str, Any], says: str
) -> None:
    async with running(config_for(built)) as pool:
        status, reply = await pool.post(f"/v1/collections/docs/{call}", body)
        assert (status, says in reply["error"]["message"]) == (400, True), reply
        assert f'"rows":{COUNT}' in (await pool.get("/v1/collections/docs"))[1]
