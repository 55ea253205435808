"""Passages found while a reply is streamed: it goes on behind them, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import permutations
from typing import Any

import pytest

from eval.dialects import DONE, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from router.config.retrieval import RetrievalConfig

from ..conftest import Cluster
from ..scripts import InTurn, answering, failing, usage
from ..serving.test_resume import chunk, rest, text_of
from .fake_pool import FakePool

WISH = {"collection": "docs", "stages": ["decode"], "every_tokens": 2, "threshold": 0.5}
ASIDE = "\n\n(A passage that may help: cats purr)\n\n"


def purring(body: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [("purr", 0.9, "cats purr"), ("low", 0.2, "nothing of interest")]


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    async with FakePool(purring).serving() as one:
        yield one


def begins(*words: str) -> Script:
    """A stream that has said so much and goes on as long as somebody listens."""

    async def script(request: Request) -> None:
        request.send(chunk(1, role="assistant", content=""))
        for word in words:
            request.send(chunk(1, content=word))
        await asyncio.Event().wait()

    return script


PRIMED = answering(words=1)


def scene(*scripts: Script) -> tuple[tuple[FakeWorker, FakeWorker], InTurn]:
    decode = InTurn(*scripts)
    return (FakeWorker("prefill", answering()), FakeWorker("decode", decode)), decode


async def test_a_passage_in_mid_reply(cluster: Cluster, pool: FakePool) -> None:
    workers, _ = scene(begins("cats ", "do "), PRIMED, rest(2, "purr ", "loudly", cached=101))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat(
            "what do cats do?",
            retrieval=WISH,
            stream=True,
            max_tokens=40,
            stream_options={"include_usage": True},
            rid="mine",
        )
        assert text_of(reply) == "cats do purr loudly"
        search = pool.searches[-1]
        assert search["stage"] == "decode"
        assert search["text"] == "what do cats do?\ncats do "
        first, primer, second = workers[1].bodies
        assert second["messages"] == [
            *first["messages"],
            {"role": "assistant", "content": "cats do " + ASIDE},
        ]
        assert second["continue_final_message"] is True
        assert second["max_tokens"] == 38
        assert second["custom_params"]["do_local_prefill"] is True, "on the worker that has it"
        assert len(workers[0].bodies) == 1, "and nowhere else"
        assert primer["messages"] == second["messages"], "whose KV is there by then"
        assert (primer["max_tokens"], primer["stream"]) == (1, False)
        assert primer["custom_params"] == second["custom_params"]
        rids = [body["rid"] for body in (first, primer, second)]
        assert not any(one.startswith(other) for one, other in permutations(rids, 2))
        *_, counts, last = reply.events
        assert counts["usage"]["completion_tokens"] == 4
        assert counts["usage"]["prompt_tokens"] == 100, "less what was said before"
        assert counts["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert last["retrieval"]["citations"] == [
            {"id": "purr", "score": 0.9, "turn": 1, "stage": "decode"}
        ]
        assert {one["id"] for one in reply.events if one.get("choices")} == {"id1"}
        assert await client.metric("ppd_retrieval_passages_total", how="appended") == 1
        assert await client.metric("ppd_retrieval_stalled_seconds_total") > 0
        ended = {"endpoint": "/v1/chat/completions", "outcome": "ok"}
        assert await client.metric("ppd_finished_total", **ended) == 1

        # The next turn's history has the passage where the model read it.
        said = "cats do purr loudly"
        later = await client.chat("what do cats do?", said, "why?")
        assert later.route[0] == "local"
        (_, reply_as_read, _) = workers[1].bodies[-1]["messages"]
        assert reply_as_read["content"] == f"cats do {ASIDE}purr loudly"
        # Another reply to the same question was read without.
        await client.chat("what do cats do?", "cats sleep all day", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats sleep all day"


async def test_the_stream_runs_on_while_the_passage_is_prefilled(
    cluster: Cluster, pool: FakePool
) -> None:
    priming, said = asyncio.Event(), asyncio.Event()

    async def runs_on(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await priming.wait()
        request.send(chunk(1, content="quite "))
        said.set()
        await asyncio.Event().wait()

    async def primed(request: Request) -> None:
        priming.set()
        await said.wait()
        for _ in range(3):  # the router passes on what was said meanwhile
            await client.metric("ppd_finished_total")
        await PRIMED(request)

    workers, _ = scene(runs_on, primed, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True, max_tokens=40)
        assert text_of(reply) == "cats do quite purr"
        _, primer, second = workers[1].bodies
        assert primer["messages"][-1]["content"] == f"cats do {ASIDE}"
        assert second["messages"][-1]["content"] == f"cats do {ASIDE}quite "
        assert second["max_tokens"] == 37
        await client.chat("what do cats do?", "cats do quite purr", "why?")
        read = workers[1].bodies[-1]["messages"][1]["content"]
        assert read == f"cats do {ASIDE}quite purr"


async def test_a_reply_that_ends_first_has_not_read_the_passage(
    cluster: Cluster, pool: FakePool
) -> None:
    priming, given_up = asyncio.Event(), asyncio.Event()

    async def ends(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await priming.wait()
        request.send(event({"choices": [], "usage": usage(9, 2, 0)}))
        request.send(DONE)

    async def never_primed(request: Request) -> None:
        priming.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    workers, _ = scene(ends, never_primed, answering())
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True)
        assert text_of(reply) == "cats do "
        assert reply.events[-1]["retrieval"]["citations"] == []
        await given_up.wait()
        await client.chat("what do cats do?", "cats do ", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats do "


async def test_a_worker_lost_while_it_prefills_beside_its_stream(
    cluster: Cluster, pool: FakePool
) -> None:
    """The passage goes with the stream to the worker that goes on with it."""
    priming = asyncio.Event()

    async def lost(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await priming.wait()
        request.drop()

    async def lost_too(request: Request) -> None:
        priming.set()
        await asyncio.Event().wait()

    decode = InTurn(lost, lost_too, begins("quite "), PRIMED, rest(3, "purr"))
    workers = [FakeWorker("prefill", answering()), *(FakeWorker("decode", decode) for _ in "ab")]
    config = RetrievalConfig(url=pool.url)
    async with cluster(*workers, retrieval=config, resume_streams=1) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True)
        assert text_of(reply) == "cats do quite purr"
        read = decode.bodies[-1]["messages"][-1]["content"]
        assert read.replace(ASIDE, "") == "cats do quite "
        assert ASIDE in read
        assert len(reply.events[-1]["retrieval"]["citations"]) == 1


async def test_at_most_so_many_and_none_twice(cluster: Cluster, pool: FakePool) -> None:
    """The second search finds only what is there already."""
    workers, _ = scene(begins("a ", "b "), PRIMED, rest(2, *("c " for _ in range(20))))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        wish = {**WISH, "max_additions": 5}
        reply = await client.chat("what?", retrieval=wish, stream=True)
        assert text_of(reply) == "a b " + "c " * 20
        assert len(workers[1].bodies) == 3
        assert len(reply.events[-1]["retrieval"]["citations"]) == 1


@pytest.mark.parametrize("trouble", ["nothing", "low", "down"])
async def test_without_a_passage_the_stream_is_what_it_was(
    cluster: Cluster, pool: FakePool, trouble: str
) -> None:
    workers, _ = scene(rest(1, *["a", "b", "c", "d", "e", "f"]))
    url = "http://127.0.0.1:9" if trouble == "down" else pool.url
    pool.hits = (lambda _: []) if trouble == "nothing" else (lambda _: [("low", 0.2, "dull")])
    async with cluster(*workers, retrieval=RetrievalConfig(url=url)) as client:
        reply = await client.chat("what?", retrieval=WISH, stream=True)
        assert text_of(reply) == "abcdef"
        assert len(workers[1].bodies) == 1
        assert reply.events[-1]["retrieval"]["citations"] == []


REFUSED = failing(400, "no room here")


async def test_a_stream_is_not_cut_for_what_its_worker_has_no_room_for(
    cluster: Cluster, pool: FakePool
) -> None:
    refused = asyncio.Event()

    async def goes_on(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await refused.wait()
        while not await client.metric("ppd_retrieval_passages_total", how="declined"):
            pass
        request.send(chunk(1, content="purr "))
        request.send(event({"choices": [], "usage": usage(9, 3, 0)}) + DONE)

    async def refuses(request: Request) -> None:
        refused.set()
        await REFUSED(request)

    workers, _ = scene(goes_on, refuses)
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True)
        assert text_of(reply) == "cats do purr "
        assert reply.events[-1]["retrieval"]["citations"] == []
        assert len(workers[1].bodies) == 2


async def test_a_stream_that_was_left_in_vain_goes_on_without(
    cluster: Cluster, pool: FakePool
) -> None:
    """There was room for the passage, but none for the rest of the reply behind it."""
    workers, _ = scene(begins("cats ", "do "), PRIMED, REFUSED, REFUSED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True)
        assert text_of(reply) == "cats do purr"
        *_, left, last = workers[1].bodies
        assert ASIDE in left["messages"][-1]["content"]
        assert last["messages"][-1]["content"] == "cats do "
        assert await client.metric("ppd_retrieval_stalled_seconds_total") > 0
        assert reply.events[-1]["retrieval"]["citations"] == []
        await client.chat("what do cats do?", "cats do purr", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats do purr"


async def test_a_worker_without_the_plugin_leaves_the_rest_to_a_transfer(
    cluster: Cluster, pool: FakePool
) -> None:
    workers, _ = scene(begins("cats ", "do "), rest(2, "purr"))
    workers[1].local_prefill = False
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True)
        assert text_of(reply) == "cats do purr"
        assert "bootstrap_room" in workers[1].bodies[-1]
        assert len(workers[0].bodies) == 2


async def test_a_reply_that_cannot_be_continued_is_not_cut(
    cluster: Cluster, pool: FakePool
) -> None:
    """One token is left, and then none: there is nothing to go on with."""

    async def said_all(request: Request) -> None:
        request.send(chunk(1, role="assistant", content=""))
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await pool.arrived.wait()
        for _ in range(3):  # the search's answer comes meanwhile
            await client.metric("ppd_finished_total")
        request.send(event({"choices": [], "usage": usage(9, 2, 0)}))
        request.send(DONE)

    workers, _ = scene(said_all)
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=WISH, stream=True, max_tokens=2)
        assert text_of(reply) == "cats do "
        assert len(workers[1].bodies) == 1


async def test_a_doubtful_token_is_searched_for_at_once(cluster: Cluster, pool: FakePool) -> None:
    async def unsure(request: Request) -> None:
        request.start()
        for word, logprob in (("cats ", -0.01), ("perhaps ", -3.0)):
            logprobs = {"content": [{"token": word, "logprob": logprob}]}
            choice = {"index": 0, "delta": {"content": word}, "logprobs": logprobs}
            request.send(event({"id": "id1", "choices": [choice]}))
        await asyncio.Event().wait()

    workers, _ = scene(unsure, PRIMED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        wish = {**WISH, "every_tokens": 1000, "confidence": 0.3}
        reply = await client.chat("what?", retrieval=wish, stream=True, logprobs=True)
        assert text_of(reply) == "cats perhaps purr"
        assert pool.searches[-1]["text"].endswith("cats perhaps ")


async def test_both_stages(cluster: Cluster, pool: FakePool) -> None:
    pool.hits = lambda body: [(body["stage"], 0.9, f"found at {body['stage']}")]
    workers, _ = scene(begins("cats ", "do "), PRIMED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        wish = {**WISH, "stages": ["prefill", "decode"]}
        reply = await client.chat("what do cats do?", retrieval=wish, stream=True)
        cited = [one["id"] for one in reply.events[-1]["retrieval"]["citations"]]
        assert cited == ["prefill", "decode"]
        await client.chat("what do cats do?", "cats do purr", "why?")
        asked, read, _ = workers[1].bodies[-1]["messages"]
        assert "found at prefill" in asked["content"]
        assert "found at decode" in read["content"]
