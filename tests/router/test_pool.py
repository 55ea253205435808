"""The pool over real sockets: searches, writes, and everything that can be wrong."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import h5py
import numpy as np
import pyarrow as pa
import pytest
from aiohttp import web
from pyarrow import parquet

from ppd.ann.schedule import Bounds
from ppd.ann.snapshot import Precision, Shape
from ppd.ann.space import Metric, Rows
from ppd.errors import ConfigError, IndexFileError
from router.pool.build import BuildOptions, build_collection
from router.pool.collection import Collection, index_path
from router.pool.config import PoolConfig
from router.pool.serve import make_app

OPTIONS = BuildOptions(Metric.L2, Precision.FP32, Shape(degree=16, knn=32), threads=2)
COUNT, WIDTH = 1200, 24
ROWS: Rows = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file with ids, texts and metadata, as a collection ``docs``."""
    folder = tmp_path_factory.mktemp("built")
    table = pa.table(
        {
            "id": [f"d{i}" for i in range(COUNT)],
            "vector": list(ROWS),
            "text": [f"text {i}" for i in range(COUNT)],
            "year": [2000 + i % 25 for i in range(COUNT)],
            "lang": ["en" if i % 100 else "fr" for i in range(COUNT)],
        }
    )
    parquet.write_table(table, folder / "docs.parquet")
    build_collection(folder / "docs.parquet", folder / "docs", OPTIONS, lambda text: None)
    return folder


@pytest.fixture
def data(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may write to."""
    folder = tmp_path / "data" / "docs"
    folder.mkdir(parents=True)
    for path in (built / "docs").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder.parent


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def raw(
        self, path: str, body: bytes, kind: str = "application/json"
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = {"Content-Type": kind}
        async with self._session.post(self.url + path, data=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self.url + path) as response:
            return response.status, await response.text()

    async def search(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/collections/docs/search", body)

    async def ids(self, vector: Rows, **body: Any) -> list[str]:
        status, told = await self.search(vector=vector.tolist(), **body)
        assert status == 200, told
        return [hit["id"] for hit in told["results"][0]["hits"]]


@asynccontextmanager
async def running(config: PoolConfig) -> AsyncIterator[Client]:
    config.check()
    async with aiohttp.ClientSession() as session:
        runner = web.AppRunner(make_app(config, session))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        try:
            yield Client(f"http://{host}:{port}", session)
        finally:
            await runner.cleanup()


def exact(queries: Rows, limit: int, allowed: Any = slice(None)) -> list[list[str]]:
    ids = np.arange(COUNT)[allowed]
    near = ((queries[:, None] - ROWS[ids][None]) ** 2).sum(2)
    return [[f"d{ids[j]}" for j in row[:limit]] for row in np.argsort(near, axis=1)]


async def test_one_many_and_binary_find_the_same(data: Path) -> None:
    queries = ROWS[:40] + np.float32(0.01)
    async with running(PoolConfig(data=str(data))) as pool:
        singles = [await pool.ids(query, limit=5, params={"itopk": 64}) for query in queries]
        status, told = await pool.search(
            vectors=queries.tolist(), limit=5, params={"itopk": 64}, stage="decode"
        )
        assert status == 200
        assert [[hit["id"] for hit in one["hits"]] for one in told["results"]] == singles
        same = sum(a == b for a, b in zip(singles, exact(queries, 5), strict=True))
        assert same >= 38
        hit = told["results"][0]["hits"][0]
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
    async with running(PoolConfig(data=str(data))) as pool:
        found = [await pool.ids(query, limit=10, filter=wanted) for query in queries]
    hits = sum(
        len(set(a) & set(b)) for a, b in zip(found, exact(queries, 10, allowed), strict=True)
    )
    assert hits >= 0.98 * 300
    assert {one for row in found for one in row} <= {f"d{i}" for i in allowed}


async def test_what_is_written_is_found_and_survives_restart_and_rebuild(data: Path) -> None:
    async with running(PoolConfig(data=str(data))) as pool:
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

    async with running(PoolConfig(data=str(data))) as pool:
        await holds(pool)
        status, told = await pool.post("/v1/collections/docs/rebuild", {})
        assert (status, told["rows"]) == (200, COUNT)
        await holds(pool)
    assert [path.name for path in (data / "docs").glob("*.ann")] == ["index-000002.ann"]
    async with running(PoolConfig(data=str(data))) as pool:
        await holds(pool)


async def test_searches_go_on_while_rows_come_go_and_are_rebuilt(data: Path) -> None:
    kept = ROWS[100:400:3]
    async with running(PoolConfig(data=str(data))) as pool:
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


async def test_a_deadline_that_passes_gives_what_there_is(data: Path) -> None:
    async with running(PoolConfig(data=str(data), threads=1)) as pool:
        status, told = await pool.search(
            vectors=[[0.0] * WIDTH] * 500, limit=10, timeout_ms=0.001, params={"itopk": 1024}
        )
        assert status == 200
        assert sum(one["degraded"] for one in told["results"]) == 500
        _, metrics = await pool.get("/metrics")
        assert 'ppd_pool_searches_total{ending="deadline",stage="prefill"} 500.0' in metrics


async def test_a_full_queue_says_when_to_come_again(data: Path) -> None:
    config = PoolConfig(data=str(data), bounds=Bounds(prefill=10, decode=10))
    async with running(config) as pool:
        vectors = [[0.0] * WIDTH] * 20
        body = b'{"vectors": %s}' % str(vectors).encode()
        path = "/v1/collections/docs/search"
        status, _, headers = await pool.raw(path, body)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
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
    ],
)
async def test_a_wrong_search_is_told_what_is_wrong(
    built: Path, body: dict[str, Any], status: int, says: str
) -> None:
    async with running(PoolConfig(data=str(built))) as pool:
        got, told = await pool.search(**body)
        assert (got, says in told["error"]["message"]) == (status, True), told


async def test_other_wrong_requests(built: Path) -> None:
    async with running(PoolConfig(data=str(built))) as pool:
        got, told = await pool.post("/v1/collections/nope/search", {"vector": [0.0]})
        assert (got, told["error"]["message"]) == (404, "there is no collection 'nope'")
        nan = b'{"vector": [%s]}' % b",".join([b"1e999"] * 24)
        path = "/v1/collections/docs/search"
        assert (await pool.raw(path, nan))[0] == 400
        binary = struct.pack("<4sIIIIIf", b"PPDQ", 1, WIDTH, 5, 64, 0, 0.0)
        values = np.full(WIDTH, np.nan, np.float32).tobytes()
        kind = "application/octet-stream"
        assert b"not finite" in (await pool.raw(path, binary + values, kind))[1]
        assert (await pool.raw(path, binary + values[:-4], kind))[0] == 400
        got, _ = await pool.post("/v1/feedback", {"kv_link_use": 2, "decode_stall": 0})
        assert got == 400


async def test_feedback_moves_the_controls(built: Path) -> None:
    async with running(PoolConfig(data=str(built))) as pool:
        seen = {"kv_link_use": 0.2, "decode_stall": 0.0, "prefill_wait_p95_ms": 100.0}
        _, told = await pool.post("/v1/feedback", seen)
        assert told["move"] == "prefill_waits"
        assert told["reserved"] > 0.5
        _, metrics = await pool.get("/metrics")
        assert f"ppd_pool_reserved_share {told['reserved']}" in metrics
        assert (await pool.get("/health"))[0] == 200


@pytest.mark.parametrize("kind", ["npy", "fbin", "hdf5"])
def test_vectors_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "npy":
            np.save(path, ROWS[:300])
        case "fbin":
            path.write_bytes(struct.pack("<ii", 300, WIDTH) + ROWS[:300].tobytes())
        case _:
            with h5py.File(path, "w") as file:
                file["train"] = ROWS[:300]
    build_collection(path, tmp_path / "made", OPTIONS, lambda text: None)
    made = Collection(tmp_path / "made")
    assert made.count == 300
    payload = made.payloads_of(made.target, np.array([7], np.int32))[0]
    assert payload is not None
    assert payload.id == "7"
    made.payloads.close()


def test_wrong_files_leave_nothing_behind(tmp_path: Path) -> None:
    broken = ROWS[:50].copy()
    broken[7, 3] = np.nan
    np.save(tmp_path / "nan.npy", broken)
    np.save(tmp_path / "empty.npy", ROWS[:0])
    np.save(tmp_path / "flat.npy", ROWS[0])
    (tmp_path / "cut.fbin").write_bytes(struct.pack("<ii", 300, WIDTH) + b"1234")
    (tmp_path / "odd.xyz").write_bytes(b"")
    for name, says in (
        ("nan.npy", "vector 7 is not finite"),
        ("empty.npy", "no vector"),
        ("flat.npy", "rows of numbers"),
        ("cut.fbin", "12 bytes; 300 x 24 vectors take 28808"),
        ("odd.xyz", "are read from"),
        ("absent.npy", "cannot be read"),
    ):
        with pytest.raises(IndexFileError, match=says):
            build_collection(tmp_path / name, tmp_path / "made", OPTIONS, lambda text: None)
        assert not [path for path in tmp_path.iterdir() if "made" in path.name]
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match="there already"):
        build_collection(tmp_path / "nan.npy", tmp_path / "made", OPTIONS, lambda text: None)


def test_a_damaged_truncated_or_foreign_index_is_refused(data: Path) -> None:
    path = index_path(data / "docs", 1)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    later = bytearray(whole)
    later[8] = 9
    for content, says in (
        (whole[: len(whole) // 2], "truncated"),
        (whole[:10], "not an index"),
        (b"", "cannot be opened"),
        (b"\x93NUMPY" + whole[6:], "not an index"),
        (bytes(flipped), "is damaged"),
        (bytes(later), "format 9"),
        (whole[:100] + b"x" + whole[101:], "header is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(IndexFileError, match=says):
            Collection(data / "docs")
    path.write_bytes(whole)
    Collection(data / "docs").payloads.close()


async def test_a_shard_that_is_down_is_left_out(data: Path, built: Path) -> None:
    """One shard has the new row, the other is lost in the middle; a third has a dead replica."""
    async with running(PoolConfig(data=str(data))) as one:
        point = {"id": "only-here", "vector": ROWS[0].tolist()}
        await one.post("/v1/collections/docs/points", {"points": [point]})
        async with running(PoolConfig(data=str(built))) as two:
            dead = "http://127.0.0.1:9"
            config = PoolConfig(shards=((one.url, dead), (dead, two.url)))
            async with running(config) as front:
                for _ in range(10):
                    status, told = await front.search(vector=ROWS[0].tolist(), limit=3)
                    assert (status, told["partial"]) == (200, False)
                    names = [hit["id"] for hit in told["results"][0]["hits"]]
                    assert sorted(names) == ["d0", "d0", "only-here"]
                status, told = await front.search(vector=[0.0])
                assert (status, "1 dimensions" in told["error"]["message"]) == (400, True)
                lost = PoolConfig(shards=((one.url,), (dead,)))
                async with running(lost) as half:
                    status, told = await half.search(vector=ROWS[0].tolist(), limit=3)
                    assert (status, told["partial"], told["missing"]) == (200, True, ["shard1"])
                    assert len(told["results"][0]["hits"]) == 3


async def test_text_is_embedded_by_a_server(built: Path) -> None:
    """Which answers in any order; and one that answers nonsense is named."""
    wrong: list[web.Response] = []

    async def embed(request: web.Request) -> web.Response:
        if wrong:
            return wrong.pop()
        texts = (await request.json())["input"]
        rows = [{"index": i, "embedding": ROWS[int(t)].tolist()} for i, t in enumerate(texts)]
        return web.json_response({"data": rows[::-1]})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with running(PoolConfig(data=str(built), embeddings_url=url)) as pool:
        status, told = await pool.search(texts=["7", "300"], limit=1)
        assert status == 200
        assert [one["hits"][0]["id"] for one in told["results"]] == ["d7", "d300"]
        for answer, says in (
            (web.Response(status=500), "answered 500"),
            (web.json_response({"data": []}), "gave 0 vectors for 1 texts"),
            (web.Response(text="{"), url),
        ):
            wrong.append(answer)
            status, told = await pool.search(text="7")
            assert status == 503
            assert says in told["error"]["message"]
        await runner.cleanup()
        status, told = await pool.search(text="7")
        assert status == 503
