"""Retrieval in the Responses and Messages APIs: the same fields, in requests and in answers."""

from __future__ import annotations

from typing import Any

import pytest

from eval.fake_worker.state import MODEL
from router.config.retrieval import RetrievalConfig

from ..apis.speaking import by_anthropic, by_openai, saying, scene
from ..conftest import Cluster
from .chats import WISH, sent
from .fake_pool import FakePool

CITED = [("cats-1", 0.9), ("common", 0.5)]


def cited(retrieval: dict[str, Any]) -> list[tuple[str, float]]:
    assert retrieval["status"] == "ok"
    return [(one["id"], one["score"]) for one in retrieval["citations"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_cites(cluster: Cluster, pool: FakePool, stream: bool) -> None:
    config = RetrievalConfig(url=pool.url)
    speaking = scene(cluster, saying("purr"), retrieval=config)
    async with speaking as (client, d), by_openai(client) as speaker:
        asked: dict[str, Any] = {"model": MODEL, "input": "about cats", "stream": stream}
        reply: Any = await speaker.responses.create(**asked, extra_body={"retrieval": WISH})
        if stream:
            *_, completed = [one async for one in reply]
            reply = completed.response
        assert cited(reply.retrieval) == CITED
        assert "all about cats" in sent(d)[0]
        # The next one is served without, and gets back what the first had.
        again = await speaker.responses.create(
            model=MODEL,
            input="and dogs",
            previous_response_id=reply.id,
            extra_body={"retrieval": None},
        )
        earlier: Any = again
        assert [one["id"] for one in earlier.retrieval["citations"]] == ["cats-1", "common"]
        assert "all about cats" in sent(d)[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_cites(cluster: Cluster, pool: FakePool, stream: bool) -> None:
    config = RetrievalConfig(url=pool.url)
    speaking = scene(cluster, saying("purr"), retrieval=config)
    async with speaking as (client, d), by_anthropic(client) as speaker:
        reply: Any = await speaker.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": "about cats"}],
            stream=stream,
            extra_body={"retrieval": WISH},
        )
        if stream:
            (reply,) = [one async for one in reply if one.type == "message_delta"]
        assert cited(reply.retrieval) == CITED
        assert "all about cats" in sent(d)[0]
