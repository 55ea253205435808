"""Rows that must not be found lie where the query does; those behind them are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ppd.ann.graph import no_progress
from ppd.ann.snapshot import Precision, Shape
from ppd.ann.space import Metric, Rows
from router.pool.build import BuildOptions, build_collection

from .pools import Client, config_for, running

CROWD, WIDTH = 2600, 32
SOURCE = np.random.default_rng(5)
HERE, THERE = (SOURCE.normal(size=(CROWD, WIDTH)).astype(np.float32) for _ in range(2))
ROWS: Rows = np.concatenate([HERE, THERE + np.float32(6.0)])


@pytest.fixture(params=[Precision.INT8, Precision.FP32])
def crowds(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two crowds of rows; which one a row is of stands in its metadata."""
    table = pa.table(
        {
            "id": [str(i) for i in range(2 * CROWD)],
            "vector": list(ROWS),
            "crowd": ["here"] * CROWD + ["there"] * CROWD,
        }
    )
    parquet.write_table(table, tmp_path / "docs.parquet")
    options = BuildOptions(Metric.L2, request.param, Shape(degree=16, knn=32), threads=2)
    (tmp_path / "data").mkdir()
    build_collection(tmp_path / "docs.parquet", tmp_path / "data" / "docs", options, no_progress)
    return tmp_path / "data"


async def recall(pool: Client, allowed: Rows, offset: int, **more: Any) -> float:
    """Of queries among those that may not be found, in searches for ten."""
    queries = HERE[:25] + np.float32(0.01)
    _, reply = await pool.search(vectors=queries.tolist(), limit=10, **more)
    near = ((queries[:, None] - allowed[None]) ** 2).sum(2).argsort(1)[:, :10] + offset
    found = [{int(hit["id"]) for hit in one["hits"]} for one in reply["results"]]
    assert not any(one["degraded"] for one in reply["results"])
    hits = sum(len(a & set(b)) for a, b in zip(found, near.tolist(), strict=True))
    return hits / int(near.size)


async def test_a_filter_that_follows_the_vectors(crowds: Path) -> None:
    async with running(config_for(crowds)) as pool:
        assert await recall(pool, ROWS[CROWD:], CROWD, filter={"crowd": "there"}) >= 0.98


async def test_a_crowd_that_was_deleted(crowds: Path) -> None:
    async with running(config_for(crowds, rebuild_share=10.0)) as pool:
        gone = {"filter": {"crowd": "here"}}
        status, reply = await pool.post("/v1/collections/docs/delete", gone)
        assert (status, reply) == (200, {"deleted": CROWD})
        assert await recall(pool, ROWS[CROWD:], CROWD) >= 0.98
        assert len(await pool.ids(HERE[0], limit=64)) == 64


async def test_a_row_has_one_score_however_it_was_found(crowds: Path) -> None:
    """Alone, with a filter that all rows pass, and with one that few do."""
    async with running(config_for(crowds)) as pool:
        point = {"id": "new", "vector": HERE[0].tolist(), "metadata": {"crowd": "few"}}
        few = [
            {"id": f"few{i}", "vector": HERE[i].tolist(), "metadata": {"crowd": "few"}}
            for i in range(100)
        ]
        await pool.post("/v1/collections/docs/points", {"points": [point, *few]})
        query = (HERE[0] + np.float32(0.02)).tolist()
        scores = []
        for wanted in (None, {"crowd": {"ne": "nobody"}}, {"crowd": "few"}):
            _, reply = await pool.search(vector=query, limit=50, filter=wanted)
            hits = reply["results"][0]["hits"]
            scores.append({hit["id"]: hit["score"] for hit in hits})
        assert scores[0]["new"] == pytest.approx(float(WIDTH * np.float32(0.02) ** 2), rel=1e-3)
        for other in scores[1:]:
            shared = scores[0].keys() & other.keys()
            assert "new" in shared
            for name in shared:
                assert other[name] == pytest.approx(scores[0][name], rel=1e-5)
        exact = ((np.array(query, np.float32) - HERE[:100]) ** 2).sum(1)
        assert [scores[2][f"few{i}"] for i in exact.argsort()[:20].tolist()] == pytest.approx(
            sorted(exact)[:20], rel=1e-4
        )
