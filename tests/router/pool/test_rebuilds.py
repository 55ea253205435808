"""Indexes built anew while rows come and go: when asked, when outdated, when a pool stops."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from ppd.ann.graph import no_progress
from ppd.ann.growth import Growth
from ppd.ann.neighbours import Finder
from ppd.ann.snapshot import Shape
from ppd.ann.space import Metric
from ppd.errors import IndexFileError
from router.pool.build import build_collection
from router.pool.collection import Collection

from ...disks import disk_of
from ..fixtures import until
from .pools import OPTIONS, ROWS, WIDTH, Client, config_for, running


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


async def test_a_row_of_zeros_has_no_direction_after_a_rebuild(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = ROWS[:300].copy()
    rows[0] = 0.0
    np.save(tmp_path / "rows.npy", rows)
    options = replace(OPTIONS, metric=Metric.COSINE)
    build_collection(tmp_path / "rows.npy", tmp_path / "data" / "docs", options, no_progress)
    async with running(config_for(tmp_path / "data")) as pool:
        for _ in range(2):
            for query in rows[1:9]:
                _, reply = await pool.search(vector=query.tolist(), limit=300)
                scores = {hit["id"]: hit["score"] for hit in reply["results"][0]["hits"]}
                assert scores["0"] == pytest.approx(0.5, abs=1e-4)
            assert (await pool.post("/v1/collections/docs/rebuild", {}))[0] == 200


async def test_a_rebuild_has_more_candidates_than_neighbours(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "rows.npy", ROWS)
    options = replace(OPTIONS, shape=Shape(degree=96, knn=128))
    build_collection(tmp_path / "rows.npy", tmp_path / "data" / "docs", options, no_progress)
    async with running(config_for(tmp_path / "data")) as pool:
        assert (await pool.post("/v1/collections/docs/rebuild", {}))[0] == 200
        _, text = await pool.get("/v1/collections/docs")
        assert orjson.loads(text)["degree"] == 96


async def test_a_rebuild_that_fails_leaves_all_as_it_was(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise IndexFileError("no space left on device")

    async def rebuilt(pool: Client) -> tuple[int, Any]:
        return await pool.post("/v1/collections/docs/rebuild", {})

    async def told_and_as_it_was(pool: Client) -> str:
        status, reply = await rebuilt(pool)
        assert status == 503
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"
        assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000001.ann"]
        message: str = reply["error"]["message"]
        return message

    size = (data / "docs" / "index-000001.ann").stat().st_size
    async with running(config_for(data)) as pool:
        point = {"id": "new", "vector": [9.0] * WIDTH}
        await pool.post("/v1/collections/docs/points", {"points": [point]})
        with disk_of(size // 2):
            assert "index-000002.ann: cannot be written: " in await told_and_as_it_was(pool)
        with monkeypatch.context() as patch:
            patch.setattr("router.pool.payloads.Payloads.adopt", full)
            assert await told_and_as_it_was(pool) == "no space left on device"
        assert (await rebuilt(pool))[0] == 200
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "new"


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
        _, reply = await pool.post(f"{path}/search", {"vectors": queries.tolist(), "limit": 1})
        found = [one["hits"][0]["id"] for one in reply["results"]]
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
            await until(lambda: reply(caplog))
    assert caplog.text.count("its index could not be built anew: disk full") == 1


async def reply(caplog: pytest.LogCaptureFixture) -> bool:
    await asyncio.sleep(0)
    return "disk full" in caplog.text
