"""Passages at the tail of a chat: placed, told, remembered, put back."""

from __future__ import annotations

from router.config.retrieval import RetrievalConfig

from ..conftest import Cluster
from .chats import WISH, Engines, block, sent
from .fake_pool import FakePool


async def test_passages_come_with_the_new_turn_and_are_cited(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("tell me about cats", retrieval=WISH)
        assert sent(engines[1]) == [
            block("all about cats", "known everywhere") + "tell me about cats"
        ]
        assert "retrieval" not in engines[1].bodies[-1]
        assert pool.searches[-1]["text"] == "tell me about cats"
        assert pool.searches[-1]["stage"] == "prefill"
        told = reply.json["retrieval"]
        assert told["status"] == "ok"
        assert told["citations"] == [
            {"id": "cats-1", "score": 0.9, "turn": 1, "stage": "prefill"},
            {"id": "common", "score": 0.5, "turn": 1, "stage": "prefill"},
        ]
        assert reply.json["choices"]
        assert await client.metric("ppd_retrieval_total", stage="prefill", status="ok") == 1


async def test_a_stream_ends_with_one_more_event(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        with_it = await client.chat("about cats", retrieval=WISH, stream=True)
        without = await client.chat("about dogs", stream=True)
        *events, last = with_it.events
        assert len(events) == len(without.events)
        assert last["choices"] == []
        assert [one["id"] for one in last["retrieval"]["citations"]] == ["cats-1", "common"]
        assert not any("retrieval" in event for event in without.events)


async def test_later_turns_get_earlier_passages_back_and_stay_local(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=WISH)
        first = sent(engines[1])[0]
        second = await client.chat("about cats", "they purr", "and about dogs", retrieval=WISH)
        assert second.route[0] == "local"
        # What the conversation holds already is not brought again.
        assert sent(engines[1]) == [
            first,
            "they purr",
            block("all about dogs", "more about dogs") + "and about dogs",
        ]
        cited = second.json["retrieval"]["citations"]
        assert [(one["id"], one["turn"]) for one in cited] == [
            ("cats-1", 1), ("common", 1), ("dogs-1", 2), ("dogs-2", 2),
        ]  # fmt: skip
        # Also if this turn asks for none.
        third = await client.chat("about cats", "they purr", "and about dogs", "bark", "why?")
        assert third.route[0] == "local"
        assert sent(engines[1])[:1] == [first]
        assert sent(engines[1])[-1] == "why?"
        assert third.json["retrieval"]["status"] == "off"
        assert await client.metric("ppd_retrieval_passages_total", how="put_back") == 2 + 4


async def test_forks_share_what_they_have_in_common_and_edits_lose_it(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=WISH)
        first = sent(engines[1])[0]
        await client.chat("about cats", "they purr", "about dogs", retrieval=WISH)
        await client.chat("about cats", "they purr", "about fish", retrieval=WISH)
        assert sent(engines[1])[0] == first
        assert sent(engines[1])[2].endswith("about fish")
        edited = await client.chat("about cows", "they purr", "about dogs", retrieval=WISH)
        assert sent(engines[1])[0] == "about cows"
        assert edited.route == ("remote", "first_turn")


async def test_the_same_turn_again_gets_the_same_passages(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=WISH)
        first = sent(engines[1])
        again = await client.chat("about cats", retrieval=WISH)
        assert sent(engines[1]) == first
        assert len(pool.searches) == 1
        assert again.json["retrieval"]["status"] == "reused"
        await client.chat("about cats", retrieval={**WISH, "k": 1})
        assert len(pool.searches) == 2, "it was wished otherwise"
        without = await client.chat("about cats", retrieval=None)
        assert sent(engines[1]) == ["about cats"]
        assert "retrieval" not in without.json or without.json["retrieval"]["citations"] == []
        await client.chat("about cats", "they purr", "go on")
        assert sent(engines[1])[0] == "about cats", "the newest answer was without"


async def test_a_lost_memory_is_a_remote_turn(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    """Another router, or one that was started again, serves the history as it comes."""
    config = RetrievalConfig(url=pool.url)
    async with engines[0].serving(), engines[1].serving():
        async with cluster(*engines, retrieval=config) as client:
            await client.chat("about cats", retrieval=WISH)
        async with cluster(*engines, retrieval=config) as client:
            second = await client.chat("about cats", "they purr", "and dogs", retrieval=WISH)
        assert second.route == ("remote", "first_turn")
    assert sent(engines[1])[0] == "about cats"


async def test_what_falls_out_of_memory_is_not_put_back(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    config = RetrievalConfig(url=pool.url, memory_bytes=1500)
    async with cluster(*engines, retrieval=config) as client:
        for topic in ("cats", "dogs", "fish"):
            await client.chat(f"about {topic}", retrieval=WISH)
        await client.chat("about cats", "they purr", "why?")
        assert sent(engines[1])[0] == "about cats"
        await client.chat("about fish", "they swim", "why?")
        assert sent(engines[1])[0] != "about fish"
