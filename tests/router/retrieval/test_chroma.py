"""Chroma in the pool's place: a router with Chroma's own server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web

from eval.cluster import free_port, launching
from eval.fake_worker.worker import FakeWorker
from router.config.retrieval import Chroma, RetrievalConfig

from ..conftest import Cluster
from ..scripts import answering
from .conftest import serving
from .topics import TOPICS, vector_of

OPTIONS = {"collection": "docs", "k": 1}
# The server is in the package's extension, which needs none of its requirements.
_SERVE = "import sys, chromadb_rust_bindings as chroma; chroma.cli(sys.argv)"
_API = "api/v2/tenants/default_tenant/databases/default_database/collections"


class Store:
    """A Chroma server with one passage for each topic."""

    def __init__(self, url: str) -> None:
        self.url = url

    def fill(self) -> None:
        """Make the collection, with a new id."""
        found = self._send("POST", "", {"name": "docs", "configuration": {"hnsw": {"space": "ip"}}})
        self._send(
            "POST",
            f"/{found['id']}/add",
            {
                "ids": list(TOPICS),
                "embeddings": [vector_of(topic) for topic in TOPICS],
                "documents": [f"all about {topic}" for topic in TOPICS],
                "metadatas": [{"legs": legs} for legs in (4, 4, 0, 2)],
            },
        )

    def drop(self) -> None:
        """Delete the collection."""
        self._send("DELETE", "/docs", None)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/{_API}{path}", data, headers, method=method)
        with urlopen(request, timeout=30) as response:
            return json.load(response)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("chromadb_rust_bindings")
    folder = tmp_path_factory.mktemp("chroma")
    port = free_port()
    flags = ["run", "--host", "127.0.0.1", "--port", str(port), "--path", str(folder / "data")]
    with launching(folder) as launch:
        server = launch.start("chroma", port, [sys.executable, "-c", _SERVE, *flags])
        server.wait_ready("/api/v2/heartbeat", time.monotonic() + 60.0)
        yield Store(server.url)


@pytest.fixture
def filled(store: Store) -> Iterator[Store]:
    store.fill()
    yield store
    store.drop()


def config_of(store: Store, embeddings: str) -> RetrievalConfig:
    return RetrievalConfig(chroma=Chroma(url=store.url, embeddings_url=embeddings), max_ms=10_000)


async def test_passages_come_from_chroma(cluster: Cluster, embeddings: str, filled: Store) -> None:
    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(*engines, retrieval=config_of(filled, embeddings)) as client:
        reply = await client.chat("tell me of dogs", retrieval=OPTIONS)
        report = reply.json["retrieval"]
        assert report["status"] == "ok", report
        (citation,) = report["citations"]
        assert citation["id"] == "dogs"
        assert "all about dogs" in engines[1].bodies[-1]["messages"][0]["content"]
        legs = {"legs": {"$eq": 4}}
        filtered = await client.chat("tell me of fish", retrieval={**OPTIONS, "filter": legs})
        assert filtered.json["retrieval"]["citations"][0]["id"] in ("cats", "dogs")
        wrong = await client.chat("of cats", retrieval={**OPTIONS, "collection": "none"})
        assert wrong.json["retrieval"]["status"] == "failed"
        assert "404" in wrong.json["retrieval"]["error"]


async def test_a_collection_that_was_made_anew_is_found(
    cluster: Cluster, embeddings: str, filled: Store
) -> None:
    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(*engines, retrieval=config_of(filled, embeddings)) as client:
        for _ in range(2):
            reply = await client.chat("tell me of cats", retrieval=OPTIONS)
            assert reply.json["retrieval"]["citations"][0]["id"] == "cats", reply.json["retrieval"]
            filled.drop()
            filled.fill()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"no json", "malformed"),
        (b'{"ids": [], "distances": [], "documents": [], "metadatas": []}', "not one list"),
    ],
)
async def test_a_malformed_answer_fails_the_search_alone(
    cluster: Cluster, embeddings: str, answer: bytes, error: str
) -> None:
    async def answering_oddly(request: web.Request) -> web.Response:
        found = b'{"id": "c1"}' if request.method == "GET" else answer
        return web.Response(body=found, content_type="application/json")

    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with (
        serving("/{path:.*}", answering_oddly) as url,
        cluster(*engines, retrieval=config_of(Store(url), embeddings)) as client,
    ):
        reply = await client.chat("tell me of dogs", retrieval=OPTIONS)
        assert reply.status == 200
        assert reply.json["retrieval"]["status"] == "failed"
        assert error in reply.json["retrieval"]["error"]
