"""Milvus in the pool's place: a router with Milvus Lite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.fake_worker.worker import FakeWorker
from router.config.retrieval import Chroma, Milvus, RetrievalConfig

from ..conftest import Cluster
from ..scripts import answering
from .topics import TOPICS, vector_of

OPTIONS = {"collection": "docs", "k": 1}


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


async def test_a_distance_has_a_minus_sign(
    cluster: Cluster, embeddings: str, tmp_path: Path
) -> None:
    """So the threshold leaves out what is far, also where Milvus compares by distance."""
    from pymilvus import MilvusClient

    path = str(tmp_path / "distances.db")
    client = MilvusClient(path)
    client.create_collection(
        "docs", dimension=4, id_type="string", max_length=64, metric_type="L2", auto_id=False
    )
    rows = [{"id": t, "vector": vector_of(t), "text": f"all about {t}"} for t in TOPICS]
    client.insert("docs", rows)
    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    options = Milvus(uri=path, embeddings_url=embeddings)
    async with cluster(*engines, retrieval=RetrievalConfig(milvus=options)) as router:
        for k in (1, 4):
            asked = {**OPTIONS, "k": k, "threshold": -0.5}
            reply = await router.chat("tell me of dogs", f"answer {k}", "and dogs", retrieval=asked)
            report = reply.json["retrieval"]
            assert [(one["id"], one["score"]) for one in report["citations"]] == [("dogs", 0.0)]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (RetrievalConfig(), "give one of url, milvus and chroma"),
        (RetrievalConfig(url="http://p", milvus=Milvus("u", "http://e")), "give one of url"),
        (RetrievalConfig(milvus=Milvus("u", "http://e"), chroma=Chroma("u", "e")), "give one of"),
        (RetrievalConfig(milvus=Milvus("u", "e")), "embeddings_url must begin with http"),
        (RetrievalConfig(chroma=Chroma("u", "http://e")), "chroma.url must begin with http"),
    ],
)
def test_one_of_them(config: RetrievalConfig, problem: str) -> None:
    assert problem in "; ".join(config.problems())
