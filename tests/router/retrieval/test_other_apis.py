"""Retrieval in the Responses and Messages APIs: the same fields, in requests and in answers."""

from __future__ import annotations

from typing import Any

import pytest

from eval.fake_worker.state import MODEL
from router.config.retrieval import RetrievalConfig

from ..apis.clients import by_anthropic, by_openai, replying, running_cluster
from ..conftest import Cluster
from .chats import OPTIONS, sent
from .fake_pool import FakePool

CITATIONS = [("cats-1", 0.9), ("common", 0.5)]


def citations_of(retrieval: dict[str, Any]) -> list[tuple[str, float]]:
    assert retrieval["status"] == "ok"
    return [(citation["id"], citation["score"]) for citation in retrieval["citations"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_citations(cluster: Cluster, pool: FakePool, stream: bool) -> None:
    config = RetrievalConfig(url=pool.url)
    cluster_context = running_cluster(cluster, replying("purr"), retrieval=config)
    async with cluster_context as (client, d), by_openai(client) as api:
        fields: dict[str, Any] = {"model": MODEL, "input": "about cats", "stream": stream}
        reply: Any = await api.responses.create(**fields, extra_body={"retrieval": OPTIONS})
        if stream:
            *_, completed = [event async for event in reply]
            reply = completed.response
        assert citations_of(reply.retrieval) == CITATIONS
        assert "all about cats" in sent(d)[0]
        # The next turn has no retrieval, and the passages of the first one are inserted again.
        again = await api.responses.create(
            model=MODEL,
            input="and dogs",
            previous_response_id=reply.id,
            extra_body={"retrieval": None},
        )
        earlier: Any = again
        citations = earlier.retrieval["citations"]
        assert [citation["id"] for citation in citations] == ["cats-1", "common"]
        assert "all about cats" in sent(d)[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_citations(cluster: Cluster, pool: FakePool, stream: bool) -> None:
    config = RetrievalConfig(url=pool.url)
    cluster_context = running_cluster(cluster, replying("purr"), retrieval=config)
    async with cluster_context as (client, d), by_anthropic(client) as api:
        reply: Any = await api.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": "about cats"}],
            stream=stream,
            extra_body={"retrieval": OPTIONS},
        )
        if stream:
            (reply,) = [event async for event in reply if event.type == "message_delta"]
        assert citations_of(reply.retrieval) == CITATIONS
        assert "all about cats" in sent(d)[0]
