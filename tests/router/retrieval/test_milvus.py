"""Milvus in the pool's place: a router with Milvus Lite."""

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
OPTIONS = {"collection": "docs", "k": 1}


def vector_of(text: str) -> list[float]:
    """A vector with 1 for each topic in the text."""
    vector = [float(topic in text) for topic in TOPICS]
    return vector if any(vector) else [0.0, 0.0, 0.0, 1.0]


@pytest.fixture
async def embeddings() -> AsyncIterator[str]:
    """The URL of a server of embeddings."""

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
    """The path of a database with one passage for each topic."""
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
    options = Milvus(uri=database, embeddings_url=embeddings)
    async with cluster(*engines, retrieval=RetrievalConfig(milvus=options)) as client:
        reply = await client.chat("tell me of dogs", retrieval=OPTIONS)
        report = reply.json["retrieval"]
        assert report["status"] == "ok", report
        (citation,) = report["citations"]
        assert (citation["id"], citation["score"]) == ("dogs", 1.0)
        assert "all about dogs" in engines[1].bodies[-1]["messages"][0]["content"]
        filtered = await client.chat(
            "tell me of fish", retrieval={**OPTIONS, "filter": "legs == 4"}
        )
        assert filtered.json["retrieval"]["citations"][0]["id"] in ("cats", "dogs")
        wrong = await client.chat("of cats", retrieval={**OPTIONS, "collection": "none"})
        assert wrong.json["retrieval"]["status"] == "failed"
        assert "none" in wrong.json["retrieval"]["error"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (RetrievalConfig(), "give one of url and milvus"),
        (RetrievalConfig(url="http://p", milvus=Milvus("u", "http://e")), "give one of url"),
        (RetrievalConfig(milvus=Milvus("u", "e")), "embeddings_url must begin with http"),
    ],
)
def test_one_of_both(config: RetrievalConfig, problem: str) -> None:
    assert problem in "; ".join(config.problems())
