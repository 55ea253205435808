"""The decode stage: a reply is continued behind passages, as one stream."""

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
from tests.waiting import HANG_S

from ..conftest import Cluster
from ..scripts import InTurn, answering, failing, usage
from ..serving.test_resume import LOST, chunk, rest, text_of
from .fake_pool import FakePool

OPTIONS = {"collection": "docs", "stages": ["decode"], "every_tokens": 2, "threshold": 0.5}
PASSAGE = "\n\n(A passage that may help: cats purr)\n\n"


def purring(body: dict[str, Any]) -> list[tuple[str, float, str]]:
    """The hits of every search: a good one and one below the threshold."""
    return [("purr", 0.9, "cats purr"), ("low", 0.2, "nothing of interest")]


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    """A pool with these hits."""
    async with FakePool(purring).serving() as pool:
        yield pool


def endless(*words: str) -> Script:
    """A stream of these words that does not end until the client disconnects."""

    async def script(request: Request) -> None:
        request.send(chunk(1, role="assistant", content=""))
        for word in words:
            request.send(chunk(1, content=word))
        await asyncio.Event().wait()

    return script


PRIMED = answering(words=1)


def scripted_workers(*scripts: Script) -> tuple[tuple[FakeWorker, FakeWorker], InTurn]:
    """A prefill worker, and a decode worker that answers with one script after another."""
    decode = InTurn(*scripts)
    return (FakeWorker("prefill", answering()), FakeWorker("decode", decode)), decode


async def test_a_passage_in_the_middle_of_a_reply(cluster: Cluster, pool: FakePool) -> None:
    workers, _ = scripted_workers(
        endless("cats ", "do "), PRIMED, rest(2, "purr ", "loudly", cached=101)
    )
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat(
            "what do cats do?",
            retrieval=OPTIONS,
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
            {"role": "assistant", "content": "cats do " + PASSAGE},
        ]
        assert second["continue_final_message"] is True
        assert second["max_tokens"] == 38
        assert second["custom_params"]["do_local_prefill"] is True, (
            "on the worker that holds the KV"
        )
        assert len(workers[0].bodies) == 1, "no further prefill leg"
        assert primer["messages"] == second["messages"], "it caches the prompt of the next request"
        assert (primer["max_tokens"], primer["stream"]) == (1, False)
        assert primer["custom_params"] == second["custom_params"]
        rids = [body["rid"] for body in (first, primer, second)]
        assert not any(one.startswith(other) for one, other in permutations(rids, 2))
        *_, last, counts = reply.events
        assert {name: last[name] for name in ("id", "choices")} == {"id": "id1", "choices": []}
        assert counts["usage"]["completion_tokens"] == 4
        assert counts["usage"]["prompt_tokens"] == 100, (
            "without the tokens of the first leg's reply"
        )
        assert counts["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert last["retrieval"]["citations"] == [
            {"id": "purr", "collection": "docs", "score": 0.9, "turn": 1, "stage": "decode"}
        ]
        assert {event["id"] for event in reply.events if event.get("choices")} == {"id1"}
        assert await client.metric("ppd_retrieval_passages_total", how="appended") == 1
        assert await client.metric("ppd_retrieval_stalled_seconds_total") > 0
        ended = {"endpoint": "/v1/chat/completions", "outcome": "ok"}
        assert await client.metric("ppd_finished_total", **ended) == 1

        # The next turn's history has the passage at the same place.
        later = await client.chat("what do cats do?", "cats do purr loudly", "why?")
        assert later.route[0] == "local"
        (_, reply_as_read, _) = workers[1].bodies[-1]["messages"]
        assert reply_as_read["content"] == f"cats do {PASSAGE}purr loudly"
        # Another reply to the same question has no passage.
        other = await client.chat("what do cats do?", "cats sleep all day", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats sleep all day"
        assert other.events[-1]["retrieval"]["citations"] == []


async def test_a_turn_that_is_sent_again_has_no_passage_of_its_first_reply(
    cluster: Cluster, pool: FakePool
) -> None:
    workers, _ = scripted_workers(
        endless("cats ", "do "), PRIMED, rest(2, "purr"), rest(1, "they sleep"), rest(1, "so what")
    )
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        options = {**OPTIONS, "every_tokens": 2}
        first = await client.chat("what do cats do?", retrieval=options, stream=True)
        assert len(first.events[-1]["retrieval"]["citations"]) == 1
        again = await client.chat("what do cats do?", retrieval=options, stream=True)
        assert text_of(again) == "they sleep"
        report = again.events[-1]["retrieval"]
        assert (report["status"], report["citations"]) == ("off", [])
        later = await client.chat(
            "what do cats do?", "they sleep", "why?", retrieval=options, stream=True
        )
        assert later.events[-1]["retrieval"]["citations"] == [], "the model has not read it"


async def test_a_number_of_samples_that_is_null_is_one(cluster: Cluster, pool: FakePool) -> None:
    workers, _ = scripted_workers(endless("cats ", "do "), PRIMED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True, n=None)
        assert len(reply.events[-1]["retrieval"]["citations"]) == 1


async def test_the_stream_continues_while_the_passage_is_prefilled(
    cluster: Cluster, pool: FakePool
) -> None:
    priming, continued = asyncio.Event(), asyncio.Event()

    async def continues(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await priming.wait()
        request.send(chunk(1, content="quite "))
        continued.set()
        await asyncio.Event().wait()

    async def primed(request: Request) -> None:
        priming.set()
        await continued.wait()
        for _ in range(3):  # the router relays the new chunk meanwhile
            await client.metric("ppd_finished_total")
        await PRIMED(request)

    workers, _ = scripted_workers(continues, primed, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True, max_tokens=40)
        assert text_of(reply) == "cats do quite purr"
        _, primer, second = workers[1].bodies
        assert primer["messages"][-1]["content"] == f"cats do {PASSAGE}"
        assert second["messages"][-1]["content"] == f"cats do {PASSAGE}quite "
        assert second["max_tokens"] == 37
        await client.chat("what do cats do?", "cats do quite purr", "why?")
        read = workers[1].bodies[-1]["messages"][1]["content"]
        assert read == f"cats do {PASSAGE}quite purr"


async def test_a_reply_that_ends_first_has_no_passage(cluster: Cluster, pool: FakePool) -> None:
    priming, cancelled = asyncio.Event(), asyncio.Event()

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
            cancelled.set()

    workers, _ = scripted_workers(ends, never_primed, answering())
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "cats do "
        assert reply.events[-1]["retrieval"]["citations"] == []
        await cancelled.wait()
        await client.chat("what do cats do?", "cats do ", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats do "


async def test_a_worker_is_lost_while_it_prefills_a_passage(
    cluster: Cluster, pool: FakePool
) -> None:
    """The passage moves with the stream to the worker that continues it."""
    priming = asyncio.Event()

    async def lost(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await priming.wait()
        request.drop()

    async def lost_as_well(request: Request) -> None:
        priming.set()
        await asyncio.Event().wait()

    decode = InTurn(lost, lost_as_well, endless("quite "), PRIMED, rest(3, "purr"))
    workers = [FakeWorker("prefill", answering()), *(FakeWorker("decode", decode) for _ in "ab")]
    config = RetrievalConfig(url=pool.url)
    async with cluster(*workers, retrieval=config, resume_streams=1) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "cats do quite purr"
        read = decode.bodies[-1]["messages"][-1]["content"]
        assert read.replace(PASSAGE, "") == "cats do quite "
        assert PASSAGE in read
        assert len(reply.events[-1]["retrieval"]["citations"]) == 1


async def test_no_passage_is_inserted_twice(cluster: Cluster, pool: FakePool) -> None:
    """The second search finds only the passage that the reply has."""
    workers, _ = scripted_workers(endless("a ", "b "), PRIMED, rest(2, *("c " for _ in range(20))))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        options = {**OPTIONS, "max_additions": 5}
        reply = await client.chat("what?", retrieval=options, stream=True)
        assert text_of(reply) == "a b " + "c " * 20
        assert len(workers[1].bodies) == 3
        assert len(reply.events[-1]["retrieval"]["citations"]) == 1


@pytest.mark.parametrize("trouble", ["nothing", "low", "down"])
async def test_without_a_passage_the_stream_is_unchanged(
    cluster: Cluster, pool: FakePool, trouble: str
) -> None:
    workers, _ = scripted_workers(rest(1, *["a", "b", "c", "d", "e", "f"]))
    url = "http://127.0.0.1:9" if trouble == "down" else pool.url
    pool.hits = (lambda _: []) if trouble == "nothing" else (lambda _: [("low", 0.2, "dull")])
    async with cluster(*workers, retrieval=RetrievalConfig(url=url)) as client:
        reply = await client.chat("what?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "abcdef"
        assert len(workers[1].bodies) == 1
        assert reply.events[-1]["retrieval"]["citations"] == []


REFUSED = failing(400, "no room here")


async def test_a_passage_that_the_worker_refuses_does_not_end_the_stream(
    cluster: Cluster, pool: FakePool
) -> None:
    refused = asyncio.Event()

    async def continues(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await refused.wait()
        while not await client.metric("ppd_retrieval_passages_total", how="declined"):
            pass
        request.send(chunk(1, content="purr "))
        request.send(event({"choices": [], "usage": usage(9, 3, 0)}) + DONE)

    async def refuses(request: Request) -> None:
        refused.set()
        await REFUSED(request)

    workers, _ = scripted_workers(continues, refuses)
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "cats do purr "
        assert reply.events[-1]["retrieval"]["citations"] == []
        assert len(workers[1].bodies) == 2


async def test_a_reply_that_cannot_continue_behind_the_passage_continues_without_it(
    cluster: Cluster, pool: FakePool
) -> None:
    """The worker prefills the passage, but refuses the rest of the reply."""
    workers, _ = scripted_workers(
        endless("cats ", "do "), PRIMED, REFUSED, REFUSED, rest(2, "purr")
    )
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "cats do purr"
        *_, refused, last = workers[1].bodies
        assert PASSAGE in refused["messages"][-1]["content"]
        assert last["messages"][-1]["content"] == "cats do "
        assert await client.metric("ppd_retrieval_stalled_seconds_total") > 0
        assert reply.events[-1]["retrieval"]["citations"] == []
        await client.chat("what do cats do?", "cats do purr", "why?")
        assert workers[1].bodies[-1]["messages"][1]["content"] == "cats do purr"


async def test_without_the_plugin_the_reply_is_continued_by_a_transfer(
    cluster: Cluster, pool: FakePool
) -> None:
    workers, _ = scripted_workers(endless("cats ", "do "), rest(2, "purr"))
    workers[1].local_prefill = False
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True)
        assert text_of(reply) == "cats do purr"
        assert "bootstrap_room" in workers[1].bodies[-1]
        assert len(workers[0].bodies) == 2


async def test_a_reply_without_tokens_left_is_not_continued(
    cluster: Cluster, pool: FakePool
) -> None:
    """The limit on the reply leaves no tokens for a continuation."""

    async def stops(request: Request) -> None:
        request.send(chunk(1, role="assistant", content=""))
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await pool.arrived.wait()
        for _ in range(3):  # the search's answer arrives meanwhile
            await client.metric("ppd_finished_total")
        request.send(event({"choices": [], "usage": usage(9, 2, 0)}))
        request.send(DONE)

    workers, _ = scripted_workers(stops)
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        reply = await client.chat("what do cats do?", retrieval=OPTIONS, stream=True, max_tokens=2)
        assert text_of(reply) == "cats do "
        assert len(workers[1].bodies) == 1


async def test_a_token_of_low_confidence_starts_a_search(cluster: Cluster, pool: FakePool) -> None:
    async def unsure(request: Request) -> None:
        for word, logprob in (("cats ", -0.01), ("perhaps ", -3.0)):
            logprobs = {"content": [{"token": word, "logprob": logprob}]}
            choice = {"index": 0, "delta": {"content": word}, "logprobs": logprobs}
            request.send(event({"id": "id1", "choices": [choice]}))
        await asyncio.Event().wait()

    workers, _ = scripted_workers(unsure, PRIMED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        options = {**OPTIONS, "every_tokens": 1000, "confidence": 0.3}
        reply = await client.chat("what?", retrieval=options, stream=True, logprobs=True)
        assert text_of(reply) == "cats perhaps purr"
        assert pool.searches[-1]["text"].endswith("cats perhaps ")


async def test_both_stages(cluster: Cluster, pool: FakePool) -> None:
    pool.hits = lambda body: [(body["stage"], 0.9, f"found at {body['stage']}")]
    workers, _ = scripted_workers(endless("cats ", "do "), PRIMED, rest(2, "purr"))
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        options = {**OPTIONS, "stages": ["prefill", "decode"]}
        reply = await client.chat("what do cats do?", retrieval=options, stream=True)
        cited = [citation["id"] for citation in reply.events[-1]["retrieval"]["citations"]]
        assert cited == ["prefill", "decode"]
        await client.chat("what do cats do?", "cats do purr", "why?")
        question, reply_as_read, _ = workers[1].bodies[-1]["messages"]
        assert "found at prefill" in question["content"]
        assert "found at decode" in reply_as_read["content"]


@pytest.mark.parametrize("message", ["out of memory", ""])
async def test_a_prime_that_fails_counts_against_the_worker_and_ends_nothing(
    cluster: Cluster, pool: FakePool, message: str
) -> None:
    """The stream ends when the worker has been asked to prefill the passage, and has failed."""
    asked = asyncio.Event()

    async def failing_prime(request: Request) -> None:
        asked.set()
        await failing(500, message)(request)

    async def patient(request: Request) -> None:
        request.send(chunk(1, content="cats ") + chunk(1, content="do "))
        await asked.wait()
        while not await client.metric("ppd_retrieval_passages_total", how="declined"):
            pass  # each look is a round trip
        labels = {"role": "decode", "worker": request.worker.url}
        opened.append(await client.metric("ppd_worker_breaker_open", **labels))
        request.send(chunk(1, content="sleep") + DONE)

    workers, _ = scripted_workers(patient, failing_prime)
    opened: list[float] = []
    retrieval = RetrievalConfig(url=pool.url)
    async with cluster(*workers, retrieval=retrieval, breaker_failures=1) as client:
        chat = client.chat("what do cats do?", retrieval=OPTIONS, stream=True, max_tokens=40)
        reply = await asyncio.wait_for(chat, HANG_S)
        assert text_of(reply) == "cats do sleep"
        assert opened == [1]


async def test_retrieval_before_a_turn_keeps_nothing_of_its_stream(
    cluster: Cluster, pool: FakePool
) -> None:
    """Only a stream that can be continued is kept, and only such a one can fail to be."""
    workers, _ = scripted_workers(LOST)
    options = {"collection": "docs", "stages": ["prefill"]}
    async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url)) as client:
        await client.chat("what do cats do?", retrieval=options, stream=True, max_tokens=40)
        assert await client.metric("ppd_streams_resumed_total", outcome="failed") == 0
