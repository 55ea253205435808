"""The prefill stage: passages are inserted, cited, stored and inserted again."""

from __future__ import annotations

from ppd.ann.searches import MAX_ITOPK
from router.config.retrieval import RetrievalConfig
from router.retrieval.retriever import limit_beside

from ..conftest import Cluster
from .chats import OPTIONS, Engines, block, sent
from .fake_pool import FakePool


async def test_passages_are_in_the_new_turn_and_are_cited(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("tell me about cats", retrieval=OPTIONS)
        assert sent(engines[1]) == [
            block("all about cats", "common knowledge") + "tell me about cats"
        ]
        assert "retrieval" not in engines[1].bodies[-1]
        assert pool.searches[-1]["text"] == "tell me about cats"
        assert pool.searches[-1]["stage"] == "prefill"
        report = reply.json["retrieval"]
        assert report["status"] == "ok"
        assert report["citations"] == [
            {"id": id_, "collection": "docs", "score": score, "turn": 1, "stage": "prefill"}
            for id_, score in (("cats-1", 0.9), ("common", 0.5))
        ]
        assert reply.json["choices"]
        assert await client.metric("ppd_retrieval_total", stage="prefill", status="ok") == 1


async def test_a_stream_ends_with_one_more_event(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        with_passages = await client.chat("about cats", retrieval=OPTIONS, stream=True)
        without = await client.chat("about dogs", stream=True)
        *events, last = with_passages.events
        assert len(events) == len(without.events)
        assert last["choices"] == []
        citations = last["retrieval"]["citations"]
        assert [citation["id"] for citation in citations] == ["cats-1", "common"]
        assert not any("retrieval" in event for event in without.events)


async def test_later_turns_have_earlier_passages_and_stay_local(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=OPTIONS)
        first = sent(engines[1])[0]
        second = await client.chat("about cats", "they purr", "and about dogs", retrieval=OPTIONS)
        assert second.route[0] == "local"
        # Passages that the conversation holds are not inserted twice.
        assert sent(engines[1]) == [
            first,
            "they purr",
            block("all about dogs", "more about dogs") + "and about dogs",
        ]
        cited = second.json["retrieval"]["citations"]
        assert [(citation["id"], citation["turn"]) for citation in cited] == [
            ("cats-1", 1), ("common", 1), ("dogs-1", 2), ("dogs-2", 2),
        ]  # fmt: skip
        # The same for a turn without retrieval.
        third = await client.chat("about cats", "they purr", "and about dogs", "bark", "why?")
        assert third.route[0] == "local"
        assert sent(engines[1])[:1] == [first]
        assert sent(engines[1])[-1] == "why?"
        assert third.json["retrieval"]["status"] == "off"
        assert await client.metric("ppd_retrieval_passages_total", how="put_back") == 2 + 4


async def test_passages_of_two_collections_may_have_the_same_id(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    pool.hits = lambda body: [("7", 0.9, f"7 of {body['collection']}")]
    other = {**OPTIONS, "collection": "more"}
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=OPTIONS)
        await client.chat("about cats", "they purr", "and dogs", retrieval=other)
        assert sent(engines[1])[-1] == block("7 of more") + "and dogs"
        reply = await client.chat("about cats", "they purr", "and", "x", "why?", retrieval=OPTIONS)
        assert sent(engines[1])[-1] == "why?", "it has the one of its own collection"
        cited = [(one["collection"], one["id"]) for one in reply.json["retrieval"]["citations"]]
        assert cited == [("docs", "7")], "the other turn was edited"


def test_a_long_conversation_searches_for_no_more_than_a_pool_finds() -> None:
    assert limit_beside(["a", "b"], 4) == 6
    assert limit_beside(range(2_000), 4) == MAX_ITOPK


async def test_forks_share_passages_and_edited_histories_have_none(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=OPTIONS)
        first = sent(engines[1])[0]
        await client.chat("about cats", "they purr", "about dogs", retrieval=OPTIONS)
        await client.chat("about cats", "they purr", "about fish", retrieval=OPTIONS)
        assert sent(engines[1])[0] == first
        assert sent(engines[1])[2].endswith("about fish")
        edited = await client.chat("about cows", "they purr", "about dogs", retrieval=OPTIONS)
        assert sent(engines[1])[0] == "about cows"
        assert edited.route == ("remote", "first_turn")


async def test_the_same_turn_again_gets_the_same_passages(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("about cats", retrieval=OPTIONS)
        first = sent(engines[1])
        again = await client.chat("about cats", retrieval=OPTIONS)
        assert sent(engines[1]) == first
        assert len(pool.searches) == 1
        assert again.json["retrieval"]["status"] == "reused"
        await client.chat("about cats", retrieval={**OPTIONS, "k": 1})
        assert len(pool.searches) == 2, "the options are different"
        without = await client.chat("about cats", retrieval=None)
        assert sent(engines[1]) == ["about cats"]
        assert "retrieval" not in without.json or without.json["retrieval"]["citations"] == []
        await client.chat("about cats", "they purr", "go on")
        assert sent(engines[1])[0] == "about cats", "the last answer had no passages"


async def test_without_stored_passages_a_turn_is_remote(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    """Another router, or a restarted one, serves the history as the client sends it."""
    config = RetrievalConfig(url=pool.url)
    async with engines[0].serving(), engines[1].serving():
        async with cluster(*engines, retrieval=config) as client:
            await client.chat("about cats", retrieval=OPTIONS)
        async with cluster(*engines, retrieval=config) as client:
            second = await client.chat("about cats", "they purr", "and dogs", retrieval=OPTIONS)
        assert second.route == ("remote", "first_turn")
    assert sent(engines[1])[0] == "about cats"


async def test_dropped_passages_are_not_inserted_again(
    cluster: Cluster, engines: Engines, pool: FakePool
) -> None:
    config = RetrievalConfig(url=pool.url, memory_bytes=1500)
    async with cluster(*engines, retrieval=config) as client:
        for topic in ("cats", "dogs", "fish"):
            await client.chat(f"about {topic}", retrieval=OPTIONS)
        await client.chat("about cats", "they purr", "why?")
        assert sent(engines[1])[0] == "about cats"
        await client.chat("about fish", "they swim", "why?")
        assert sent(engines[1])[0] != "about fish"
