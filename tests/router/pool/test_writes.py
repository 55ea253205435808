"""Rows come, go and are moved while others search."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppd.ann.graph import no_progress
from ppd.ann.growth import Growth
from ppd.ann.neighbours import Finder
from ppd.ann.space import Metric, Rows
from ppd.errors import IndexFileError
from router.pool.build import build_collection
from router.pool.collection import Collection
from router.pool.writes import MOST_WRITES

from ...disks import disk_of
from ..scene import until
from .pools import COUNT, OPTIONS, ROWS, WIDTH, Client, config_for, embedding, running


async def test_what_is_written_is_found_and_survives_restart_and_rebuild(data: Path) -> None:
    async with running(config_for(data)) as pool:
        point = {"id": "new", "vector": [9.0] * WIDTH, "text": "t", "metadata": {"year": 1}}
        moved = {"id": "d3", "vector": [-9.0] * WIDTH}
        status, told = await pool.post("/v1/collections/docs/points", {"points": [point, moved]})
        assert (status, told) == (200, {"upserted": 2})
        _, told = await pool.post("/v1/collections/docs/delete", {"ids": ["d4", "nobody"]})
        assert told == {"deleted": 1}

    async def holds(pool: Client) -> None:
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"
        assert (await pool.ids(np.full(WIDTH, -9.0)))[0] == "d3"
        assert "d3" not in await pool.ids(ROWS[3], limit=50)
        assert "d4" not in await pool.ids(ROWS[4], limit=50)
        assert await pool.ids(np.full(WIDTH, 0.0), filter={"year": 1}) == ["new"]

    async with running(config_for(data)) as pool:
        await holds(pool)
        status, told = await pool.post("/v1/collections/docs/rebuild", {})
        assert (status, told["rows"]) == (200, COUNT)
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


async def test_what_one_space_took_the_next_one_takes(tmp_path: Path) -> None:
    """Inner products: the longest row goes, and one as long comes after a rebuild."""
    (tmp_path / "data").mkdir()
    rows = ROWS.copy()
    rows[0] *= 10.0 / np.linalg.norm(rows[0])
    np.save(tmp_path / "rows.npy", rows)
    options = replace(OPTIONS, metric=Metric.IP)
    build_collection(tmp_path / "rows.npy", tmp_path / "data" / "docs", options, no_progress)
    long = {"id": "long", "vector": (rows[0] * 0.99).tolist()}
    async with running(config_for(tmp_path / "data")) as pool:
        await pool.post("/v1/collections/docs/delete", {"ids": ["0"]})
        assert (await pool.post("/v1/collections/docs/rebuild", {}))[0] == 200
        status, _ = await pool.post("/v1/collections/docs/points", {"points": [long]})
        assert status == 200
        assert (await pool.ids(rows[0]))[0] == "long"
    async with running(config_for(tmp_path / "data")) as pool:
        assert (await pool.ids(rows[0]))[0] == "long"


async def test_a_rebuild_that_fails_leaves_all_as_it_was(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise IndexFileError("no space left on device")

    async with running(config_for(data)) as pool:
        point = {"id": "new", "vector": [9.0] * WIDTH}
        await pool.post("/v1/collections/docs/points", {"points": [point]})
        for broken in ("router.pool.payloads.Payloads.adopt", "router.pool.index_file.write"):
            with monkeypatch.context() as patch:
                patch.setattr(broken, full)
                status, told = await pool.post("/v1/collections/docs/rebuild", {})
            assert (status, told["error"]["message"]) == (503, "no space left on device")
            assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"
            assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000001.ann"]
        assert (await pool.post("/v1/collections/docs/rebuild", {}))[0] == 200
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"


async def test_a_full_disk_refuses_rows_and_serves_on(data: Path) -> None:
    async with running(config_for(data)) as pool:
        points = [{"id": f"n{i}", "vector": [9.0] * WIDTH, "text": "x" * 500} for i in range(1000)]
        size = max(path.stat().st_size for path in (data / "docs").iterdir())
        with disk_of(size + 100_000):
            status, told = await pool.post("/v1/collections/docs/points", {"points": points})
        assert status == 503
        assert "rows.sqlite: " in told["error"]["message"]
        assert "rollback" not in told["error"]["message"]
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
        status, told = await pool.post("/v1/collections/broken/search", {"vector": [0.0]})
        assert (status, told["error"]["code"]) == (404, None)
    assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000001.ann"]


async def test_searches_go_on_while_rows_come_go_and_are_rebuilt(data: Path) -> None:
    kept = ROWS[100:400:3]
    async with running(config_for(data)) as pool:
        done = asyncio.Event()
        asked = 0

        async def ask() -> None:
            nonlocal asked
            while not done.is_set():
                row = 100 + 3 * (asked % 100)
                assert (await pool.ids(kept[asked % 100], limit=3))[0] == f"d{row}"
                asked += 1

        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(ask()) for _ in range(4)]
            for turn in range(5):
                points = [
                    {"id": f"n{turn}-{i}", "vector": (ROWS[i] + 5).tolist()} for i in range(40)
                ]
                await pool.post("/v1/collections/docs/points", {"points": points})
                gone = [f"d{600 + 40 * turn + i}" for i in range(40)]
                await pool.post("/v1/collections/docs/delete", {"ids": gone})
            await pool.post("/v1/collections/docs/rebuild", {})
            done.set()
        assert all(task.done() for task in askers)
        assert asked > 20


async def test_many_added_rows_need_not_be_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(4)
    rows = source.normal(size=(5000, WIDTH)).astype(np.float32)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "rows.npy", rows[:400])
    build_collection(tmp_path / "rows.npy", tmp_path / "data" / "docs", OPTIONS, no_progress)
    config = config_for(tmp_path / "data", rebuild_share=0.0)
    async with running(config) as pool:
        points = [{"id": f"n{i}", "vector": rows[i].tolist()} for i in range(400, 5000)]
        for start in range(0, 4600, 1000):
            some = {"points": points[start : start + 1000]}
            assert (await pool.post("/v1/collections/docs/points", some))[0] == 200
        await pool.post("/v1/collections/docs/delete", {"ids": ["n4000", "7"]})
    with closing(sqlite3.connect(tmp_path / "data" / "docs" / "rows.sqlite")) as db:
        left = "select count(*) from rows where vector is not null"
        assert db.execute(left).fetchone() == (0,)
    monkeypatch.setattr(Growth, "add", None)
    async with running(config) as pool:
        for i in (3, 500, 4999):
            assert (await pool.ids(rows[i], limit=1)) == [str(i) if i < 400 else f"n{i}"]
        for i in (7, 4000):
            assert f"n{i}" not in await pool.ids(rows[i], limit=50)
        assert '"rows":4998' in (await pool.get("/v1/collections/docs"))[1]


async def test_what_has_no_direction_has_no_cosine(tmp_path: Path) -> None:
    path = "/v1/collections/turned"
    async with running(config_for(tmp_path)) as pool:
        await pool.put(path, {"dimensions": 2})
        points = [{"id": "a", "vector": [1.0, 0.0]}, {"id": "b", "vector": [0.0, -0.0]}]
        status, told = await pool.post(f"{path}/points", {"points": points})
        assert (status, told["error"]["message"]) == (
            400,
            "points: number 1 is all zeros, which has no cosine",
        )
        assert (await pool.post(f"{path}/points", {"points": points[:1]}))[0] == 200
        status, told = await pool.post(f"{path}/search", {"vector": [0.0, 0.0]})
        assert (status, told["error"]["param"]) == (400, "vector")
        _, told = await pool.post(f"{path}/search", {"vector": [2.0, 0.0]})
        assert told["results"][0]["hits"][0]["score"] == pytest.approx(1.0)


def indexed(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "rows.sqlite")) as db:
        found = db.execute("select name from sqlite_master where name like 'by %'").fetchall()
    return {name for (name,) in found}


async def test_writes_that_are_too_many_are_told_to_come_again(
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

        first = [asyncio.create_task(write(i)) for i in range(MOST_WRITES + 5)]
        try:
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 5:
                more, _ = await asyncio.wait(set(first) - done, return_when=asyncio.FIRST_COMPLETED)
                done |= more
        finally:
            gate.set()
        statuses = [status for status, _ in await asyncio.gather(*first)]
        assert (statuses.count(200), statuses.count(429)) == (MOST_WRITES, 5)


async def test_a_collection_begins_empty_and_takes_text(tmp_path: Path) -> None:
    point = "/v1/collections/notes"

    def vectors(text: str) -> Rows:
        row: Rows = ROWS[int(text) if text.isdecimal() else 0]
        return row

    async with embedding(vectors, []) as url:
        config = config_for(tmp_path, embeddings_url=url)
        async with running(config) as pool:
            wanted = {"metric": "l2", "indexed": ["owner"]}
            status, told = await pool.put(point, wanted)
            assert (status, told["rows"], told["dimensions"]) == (201, 0, WIDTH)
            assert (await pool.put(point, {**wanted, "indexed": ["at"]}))[0] == 200
            assert indexed(tmp_path / "notes") == {"by owner", "by at"}
            assert (await pool.put(point, {"dimensions": 3}))[0] == 409
            status, told = await pool.post(f"{point}/search", {"text": "3"})
            assert (status, told["results"]) == (200, [{"hits": [], "degraded": False}])
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
            _, told = await pool.post(f"{point}/search", body)
            assert [one["hits"][0]["id"] for one in told["results"]] == ["n7", "given"]
            body = {"text": "7", "limit": 50, "filter": {"owner": "o0"}}
            _, told = await pool.post(f"{point}/search", body)
            assert len(told["results"][0]["hits"]) == 10
            gone = {"filter": {"at": {"lt": 20}}}
            assert await pool.post(f"{point}/delete", gone) == (200, {"deleted": 20})
            _, told = await pool.post(f"{point}/search", {"text": "7", "limit": 50})
            assert len(told["results"][0]["hits"]) == 11


async def test_an_outdated_index_is_built_anew_by_itself(tmp_path: Path) -> None:
    source = np.random.default_rng(3)
    rows = source.normal(size=(5000, 8)).astype(np.float32)
    path = "/v1/collections/many"
    async with running(config_for(tmp_path)) as pool:
        assert (await pool.put(path, {"dimensions": 8, "metric": "l2"}))[0] == 201
        for start in range(0, 5000, 1000):
            points = [
                {"id": str(i), "vector": rows[i].tolist()} for i in range(start, start + 1000)
            ]
            assert (await pool.post(f"{path}/points", {"points": points}))[0] == 200

        async def renewed() -> bool:
            wanted = 'ppd_pool_writes_total{collection="many",kind="rebuild"} 1.0'
            return wanted in (await pool.get("/metrics"))[1]

        await until(renewed)
        queries = rows[:50] + np.float32(0.01)
        _, told = await pool.post(f"{path}/search", {"vectors": queries.tolist(), "limit": 1})
        found = [one["hits"][0]["id"] for one in told["results"]]
        near = ((queries[:, None] - rows[None]) ** 2).sum(2).argmin(1)
        assert sum(a == str(b) for a, b in zip(found, near, strict=True)) >= 49
        assert '"precision":"int8"' in (await pool.get(path))[1]
    async with running(config_for(tmp_path)) as pool:
        assert '"rows":5000' in (await pool.get(path))[1]


@pytest.mark.parametrize("error", [IndexFileError("disk full"), MemoryError("disk full")])
async def test_a_rebuild_that_failed_rests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Not every write tries what cannot be done."""

    def fail(self: Collection, threads: int, finder: Finder) -> None:
        raise error

    monkeypatch.setattr(Collection, "rebuild", fail)
    path = "/v1/collections/many"
    async with running(config_for(tmp_path)) as pool:
        await pool.put(path, {"dimensions": 2, "metric": "l2"})
        points = [{"id": str(i), "vector": [float(i), 0.0]} for i in range(5000)]
        for some in (points, points[:1], points[1:2]):
            assert (await pool.post(f"{path}/points", {"points": some}))[0] == 200
            await until(lambda: told(caplog))
    assert caplog.text.count("its index could not be built anew: disk full") == 1


async def told(caplog: pytest.LogCaptureFixture) -> bool:
    await asyncio.sleep(0)
    return "disk full" in caplog.text


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
        status, told = await pool.put(f"/v1/collections/{path}", body)
        assert (status, says in told["error"]["message"]) == (400, True), told
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
        status, told = await pool.post(f"/v1/collections/docs/{call}", body)
        assert (status, says in told["error"]["message"]) == (400, True), told
        assert f'"rows":{COUNT}' in (await pool.get("/v1/collections/docs"))[1]
