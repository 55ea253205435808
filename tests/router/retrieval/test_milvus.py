"""Milvus in the pool's place: a real one (Lite), behind a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from eval.fake_worker.worker import FakeWorker
from router.config.retrieval import Milvus, RetrievalConfig

from ..conftest import Cluster
from ..scripts import answering

TOPICS = ("cats", "dogs", "fish", "other")
WISH = {"collection": "docs", "k": 1}


def vector_of(text: str) -> list[float]:
    found = [float(topic in text) for topic in TOPICS]
    return found if any(found) else [0.0, 0.0, 0.0, 1.0]


@pytest.fixture
async def embeddings() -> AsyncIterator[str]:
    async def embed(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        rows = [{"index": i, "embedding": vector_of(one)} for i, one in enumerate(body["input"])]
        return web.json_response({"data": rows[::-1]})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
def database(tmp_path: Path) -> str:
    from pymilvus import MilvusClient

    path = str(tmp_path / "milvus.db")
    client = MilvusClient(path)
    client.create_collection(
        "docs", dimension=4, id_type="string", max_length=64, metric_type="IP", auto_id=False
    )
    rows: list[dict[str, Any]] = [
        {"id": topic, "vector": vector_of(topic), "text": f"all about {topic}", "legs": legs}
        for topic, legs in zip(TOPICS, (4, 4, 0, 2), strict=True)
    ]
    client.insert("docs", rows)
    return path


async def test_passages_come_from_milvus(cluster: Cluster, embeddings: str, database: str) -> None:
    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    its = Milvus(uri=database, embeddings_url=embeddings)
    async with cluster(*engines, retrieval=RetrievalConfig(milvus=its)) as client:
        reply = await client.chat("tell me of dogs", retrieval=WISH)
        told = reply.json["retrieval"]
        assert told["status"] == "ok", told
        assert [(one["id"], one["score"]) for one in told["citations"]] == [("dogs", 1.0)]
        assert "all about dogs" in engines[1].bodies[-1]["messages"][0]["content"]
        filtered = await client.chat("tell me of fish", retrieval={**WISH, "filter": "legs == 4"})
        assert filtered.json["retrieval"]["citations"][0]["id"] in ("cats", "dogs")
        wrong = await client.chat("of cats", retrieval={**WISH, "collection": "none"})
        assert wrong.json["retrieval"]["status"] == "failed"
        assert "none" in wrong.json["retrieval"]["error"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (RetrievalConfig(), "give one of url and milvus"),
        (RetrievalConfig(url="http://p", milvus=Milvus("u", "http://e")), "give one of url"),
        (RetrievalConfig(milvus=Milvus("u", "e")), "embeddings_url must begin with http"),
    ],
)
def test_one_of_both(config: RetrievalConfig, named: str) -> None:
    assert named in "; ".join(config.problems())
