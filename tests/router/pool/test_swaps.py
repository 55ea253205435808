"""A collection that was built offline takes the place of one that is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ppd.ann.graph import no_progress
from ppd.errors import IndexFileError
from router.pool import index_file
from router.pool.build import BuildOptions, build_collection

from .pools import OPTIONS, ROWS, WIDTH, Client, config_for, running

NEXT = ".docs-next"
SWAP = "/v1/collections/docs/swap"


def make(data: Path, name: str = NEXT, rows: Any = ROWS[:300]) -> Path:
    """Build rows with the ids n0, n1, ... in another order than that of the served ones."""
    count = rows.shape[0]
    table = pa.table(
        {
            "id": [f"n{i}" for i in range(count)],
            "vector": list(rows[::-1]),
            "text": [f"new {i}" for i in range(count)],
            "colour": ["red" if i % 2 else "blue" for i in range(count)],
        }
    )
    parquet.write_table(table, data.parent / "next.parquet")
    options = BuildOptions(OPTIONS.metric, OPTIONS.precision, OPTIONS.shape, 2, indexed=("colour",))
    build_collection(data.parent / "next.parquet", data / name, options, no_progress)
    return data / name


async def is_new(pool: Client) -> None:
    _, reply = await pool.search(vector=ROWS[7].tolist(), limit=1)
    (hit,) = reply["results"][0]["hits"]
    assert (hit["id"], hit["text"]) == ("n292", "new 292")
    assert await pool.ids(ROWS[6], limit=1, filter={"colour": "red"}) == ["n293"]
    assert await pool.ids(ROWS[6], limit=1, filter={"lang": "en"}) == []


async def test_a_folder_that_cannot_be_removed_is_no_failure_of_the_swap(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(f"not permitted: {path}")

    make(data)
    monkeypatch.setattr("shutil.rmtree", refuse)
    async with running(config_for(data)) as pool:
        assert (await pool.post(SWAP, {"folder": NEXT}))[0] == 200
        await is_new(pool)
    assert f"docs: swapped, but {NEXT} cannot be removed: not permitted" in caplog.text


async def test_the_new_rows_are_found_and_the_old_ones_are_gone_also_after_a_restart(
    data: Path,
) -> None:
    folder = make(data)
    async with running(config_for(data)) as pool:
        late = {"id": "late", "vector": np.full(WIDTH, 9.0).tolist()}
        assert (await pool.post("/v1/collections/docs/points", {"points": [late]}))[0] == 200
        status, reply = await pool.post(SWAP, {"folder": NEXT})
        assert (status, reply["rows"]) == (200, 300)
        assert not folder.exists()
        assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000002.ann"]
        await is_new(pool)
        assert "late" not in await pool.ids(np.full(WIDTH, 9.0), limit=300)
        assert (await pool.post("/v1/collections/docs/points", {"points": [late]}))[0] == 200
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "late"
        assert (await pool.post("/v1/collections/docs/rebuild", {}))[0] == 200
        await is_new(pool)
    async with running(config_for(data)) as pool:
        await is_new(pool)
        assert (await pool.ids(np.full(WIDTH, 9.0)))[0] == "late"


async def test_searches_during_swaps_have_all_their_hits(data: Path) -> None:
    async with running(config_for(data)) as pool:
        done = asyncio.Event()

        async def search() -> int:
            count = 0
            while not done.is_set():
                status, reply = await pool.search(vector=ROWS[count % 300].tolist(), limit=5)
                assert status == 200
                hits = reply["results"][0]["hits"]
                assert len(hits) == 5
                assert len({hit["id"][0] for hit in hits}) == 1, "rows of two collections"
                count += 1
            return count

        searching = [asyncio.create_task(search()) for _ in range(4)]
        for _ in range(5):
            await asyncio.to_thread(make, data)
            assert (await pool.post(SWAP, {"folder": NEXT}))[0] == 200
        done.set()
        assert min(await asyncio.gather(*searching)) > 0


@pytest.mark.parametrize(
    ("folder", "status", "message"),
    [
        ("../other", 400, "is no folder of the pool's data folder"),
        ("..", 400, "is no folder of the pool's data folder"),
        ("served", 409, "is served itself"),
        (".absent", 503, "there is no collection"),
        (".narrow", 409, ".narrow has 8 dimensions and metric l2; docs has 24 and l2"),
        (".damaged", 503, "not an index of this pool"),
    ],
)
async def test_what_cannot_be_swapped_leaves_all_as_it_was(
    data: Path, folder: str, status: int, message: str
) -> None:
    make(data, "served")
    narrow = make(data, ".narrow", np.ascontiguousarray(ROWS[:100, :8]))
    (make(data, ".damaged") / "index-000001.ann").write_bytes(b"no index" * 100)
    async with running(config_for(data)) as pool:
        got, reply = await pool.post(SWAP, {"folder": folder})
        assert got == status
        assert message in reply["error"]["message"]
        assert (await pool.ids(ROWS[7]))[0] == "d7"
        assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000001.ann"]
        assert narrow.exists()
        assert (await pool.post("/v1/collections/nope/swap", {"folder": folder}))[0] == 404


async def test_a_full_disk_leaves_all_as_it_was(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise IndexFileError("no space left on device")

    folder = make(data)
    async with running(config_for(data)) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(index_file, "write", full)
            assert (await pool.post(SWAP, {"folder": NEXT}))[0] == 503
        assert (await pool.ids(ROWS[7]))[0] == "d7"
        assert folder.exists()
        assert (await pool.post(SWAP, {"folder": NEXT}))[0] == 200
        await is_new(pool)
