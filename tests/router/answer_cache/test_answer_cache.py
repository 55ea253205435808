"""The answer cache with a real pool: similar questions get one answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eval.dialects import DONE, event
from eval.fake_worker.request import Request
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from ppd.ann.space import Rows
from router.config.answer_cache import AnswerCacheConfig
from router.config.limits import RateLimit, Tenant
from router.config.retrieval import RetrievalConfig

from ..conftest import Client, Cluster, Reply
from ..fixtures import until
from ..pool.pools import config_for, embedding, running
from ..scripts import failing, usage

# One for each first letter, so that texts with the same first letter are near.
TOPICS: Rows = np.linalg.qr(np.random.default_rng(1).normal(size=(32, 32)))[0].astype(np.float32)


def meaning(text: str) -> Rows:
    """The vector of a text."""
    noise: Rows = np.random.default_rng(len(text)).normal(size=32).astype(np.float32)
    return np.asarray(TOPICS[ord(text[0].lower()) % 32] + 0.01 * noise, np.float32)


class Engine:
    """A script whose answers are numbered."""

    def __init__(self, **ending: Any) -> None:
        self.ending = {"finish_reason": "stop", **ending}
        self.answered = 0

    async def __call__(self, request: Request) -> None:
        if request.worker.role == "decode":
            self.answered += 1
        text = ["answer ", str(self.answered)]
        counts = usage(40, 2, 0)
        if not request.body.get("stream"):
            message = {"role": "assistant", "content": "".join(text), "tool_calls": None}
            choices = [{"index": 0, "message": message, **self.ending}]
            request.answer({"choices": choices, "usage": counts})
            return
        for part in text:
            delta = {"content": part, "reasoning_content": None}
            request.send(event({"choices": [{"index": 0, "delta": delta}]}))
        request.send(event({"choices": [{"index": 0, "delta": {}, **self.ending}]}))
        request.send(event({"choices": [], "usage": counts}) + DONE)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of an empty pool."""
    async with (
        embedding(meaning, []) as url,
        running(config_for(tmp_path, embeddings_url=url)) as server,
    ):
        yield server.url


def config(pool: str, **options: Any) -> AnswerCacheConfig:
    """A configuration whose look-ups do not time out."""
    return AnswerCacheConfig(url=pool, timeout_ms=60_000.0, **options)


def workers(script: Any) -> tuple[FakeWorker, FakeWorker]:
    """A prefill and a decode worker."""
    return FakeWorker("prefill", script), FakeWorker("decode", script)


def text(reply: Reply) -> str:
    """The text of an answer."""
    answer: str = reply.json["choices"][0]["message"]["content"]
    return answer


async def stored(client: Client, count: int) -> None:
    """Wait until so many answers are stored."""

    async def holds() -> bool:
        return await client.metric("ppd_answer_cache_kept_total") == count

    await until(holds)


async def test_a_client_that_disconnects_during_a_look_up_is_counted(cluster: Cluster) -> None:
    requested = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        requested.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    app = web.Application()
    app.router.add_post("/{path:.*}/search", hang)
    app.router.add_route("*", "/{path:.*}", _nothing)
    async with TestServer(app) as server:
        cached = config(str(server.make_url("")))
        async with cluster(*workers(Engine()), answer_cache=cached) as client:
            body = {"answer_cache": True}
            request_task = asyncio.create_task(client.chat("Is it far?", **body))
            await requested.wait()
            request_task.cancel()

            async def counted() -> bool:
                labels = {"endpoint": "/v1/chat/completions", "outcome": "disconnected"}
                return await client.metric("ppd_finished_total", **labels) == 1

            await until(counted)


async def _nothing(request: web.Request) -> web.Response:
    return web.json_response({})


async def test_a_similar_question_gets_the_stored_answer(cluster: Cluster, pool: str) -> None:
    engine = Engine()
    async with cluster(*workers(engine), answer_cache=config(pool)) as client:
        first = await client.chat("what is a radix cache?", answer_cache=True)
        assert text(first) == "answer 1"
        assert "answer_cache" not in first.json
        await stored(client, 1)
        second = await client.chat("what's a radix cache", answer_cache=True)
        assert text(second) == "answer 1"
        assert second.json["answer_cache"]["score"] > 0.95
        assert second.json["usage"]["completion_tokens"] == 2
        assert engine.answered == 1
        assert await client.metric("ppd_answer_cache_total", status="hit") == 1
        ended = {"outcome": "from_cache", "endpoint": "/v1/chat/completions"}
        assert await client.metric("ppd_finished_total", **ended) == 1
        # Another question, and the same one without the field.
        assert text(await client.chat("and decode?", answer_cache=True)) == "answer 2"
        assert text(await client.chat("what's a radix cache")) == "answer 3"


async def test_streamed_answers_are_stored_and_streamed(cluster: Cluster, pool: str) -> None:
    engine = Engine()
    options = {"include_usage": True}
    async with cluster(*workers(engine), answer_cache=config(pool, always=True)) as client:
        first = await client.chat("what?", stream=True, stream_options=options)
        assert not any("answer_cache" in event for event in first.events)
        await stored(client, 1)
        for again in ("what is it?", "what then?"):
            reply = await client.chat(again, stream=True, stream_options=options)
            answer, stop, counts = reply.events
            assert answer["choices"][0]["delta"] == {"role": "assistant", "content": "answer 1"}
            assert stop["choices"][0]["finish_reason"] == "stop"
            assert stop["answer_cache"]["score"] > 0.95
            assert counts["usage"]["completion_tokens"] == 2
        assert text(await client.chat("what now?")) == "answer 1"
        assert engine.answered == 1


async def test_an_answer_of_a_stream_without_usage_is_stored_with_it(
    cluster: Cluster, pool: str
) -> None:
    async with cluster(*workers(Engine()), answer_cache=config(pool, always=True)) as client:
        first = await client.chat("what?", stream=True)
        assert not any("usage" in event for event in first.events)
        await stored(client, 1)
        again = await client.chat("what now?")
        assert text(again) == "answer 1"
        assert again.json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.3},
        {"max_tokens": 7},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "w"}]},
        {
            "messages": [
                {"role": "user", "content": "w"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "w"},
            ]
        },
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True},
        {"answer_cache": {"threshold": 1.0}},
        {"answer_cache": None},
    ],
)
async def test_requests_that_differ_in_other_fields_have_their_own_answers(
    cluster: Cluster, pool: str, fields: dict[str, Any]
) -> None:
    engine = Engine()
    async with cluster(*workers(engine), answer_cache=config(pool, always=True)) as client:
        await client.chat("w")
        await stored(client, 1)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "why"}], **fields}
        await client.post("/v1/chat/completions", body)
        assert engine.answered == 2


async def test_tenants_share_no_answers_and_keys_are_checked(cluster: Cluster, pool: str) -> None:
    engine = Engine()
    tenants = {
        name: Tenant(
            keys=(hashlib.sha256(name.encode()).hexdigest(),),
            rate=RateLimit(requests_per_minute=1) if name == "blue" else None,
        )
        for name in ("blue", "red")
    }
    options = {"answer_cache": config(pool, always=True), "tenants": tenants}
    async with cluster(*workers(engine), **options) as client:

        async def ask(key: str) -> Reply:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "w"}]}
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", body, headers)

        assert text(await ask("blue")) == "answer 1"
        await stored(client, 1)
        assert text(await ask("red")) == "answer 2"
        assert text(await ask("blue")) == "answer 1"
        assert (await ask("nobody")).status == 401
        assert (await ask("blue")).status == 429  # a hit counts, too
        assert engine.answered == 2


@pytest.mark.parametrize("name", ["answers", "answers/search?x=", "x/../answers"])
async def test_clients_cannot_search_the_stored_questions(
    cluster: Cluster, pool: str, name: str
) -> None:
    options = {
        "answer_cache": config(pool, always=True),
        "retrieval": RetrievalConfig(url=pool, min_ms=60_000.0, max_ms=60_000.0),
    }
    async with cluster(*workers(Engine()), **options) as client:
        await client.chat("what is the secret?")
        await stored(client, 1)
        retrieval = {"collection": name, "on_failure": "fail"}
        reply = await client.chat("what is it?", retrieval=retrieval, answer_cache=False)
        assert (reply.status, b"secret" in reply.body) in ((403, False), (503, False))


async def test_expired_answers_are_deleted(cluster: Cluster, pool: str) -> None:
    engine = Engine()
    async with cluster(*workers(engine), answer_cache=config(pool, sweep_s=0.01)) as client:
        cache_options = {"ttl_s": 0.001}
        assert text(await client.chat("w", answer_cache=cache_options)) == "answer 1"
        await stored(client, 1)

        async def is_gone() -> bool:
            async with client.http.get(f"{pool}/v1/collections/answers") as response:
                return bool((await response.json())["rows"] == 0)

        await until(is_gone)
        assert text(await client.chat("w", answer_cache=cache_options)) == "answer 2"


@pytest.mark.parametrize(
    "ending",
    [
        {"finish_reason": "length"},
        {"finish_reason": "tool_calls"},
        {"finish_reason": "stop", "matched_stop": "###"},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_only_complete_answers_are_stored(
    cluster: Cluster, pool: str, ending: dict[str, Any], stream: bool
) -> None:
    engine = Engine(**ending)
    async with cluster(*workers(engine), answer_cache=config(pool, always=True)) as client:
        await client.chat("w", stream=stream)
        engine.ending = {"finish_reason": "stop"}
        await client.chat("w", stream=stream)
        await stored(client, 1)
        assert engine.answered == 2


async def test_without_a_pool_requests_are_served(cluster: Cluster) -> None:
    dead = config("http://127.0.0.1:9", always=True)
    engine = Engine()
    async with cluster(*workers(engine), answer_cache=dead) as client:
        assert text(await client.chat("w")) == "answer 1"
        assert await client.metric("ppd_answer_cache_total", status="failed") == 1
    async with cluster(*workers(failing(400, "no")), answer_cache=dead) as client:
        assert (await client.chat("w")).status == 400


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "an object, a boolean or null"),
        ({"threshold": 2}, "threshold must be"),
        ({"ttl_s": 0}, "ttl_s must be"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_malformed_options_are_refused(
    cluster: Cluster, pool: str, value: Any, problem: str
) -> None:
    async with cluster(*workers(Engine()), answer_cache=config(pool)) as client:
        reply = await client.chat("w", answer_cache=value)
        assert (reply.status, problem in reply.json["error"]["message"]) == (400, True)


async def test_a_body_that_is_nested_too_deeply_is_refused(cluster: Cluster, pool: str) -> None:
    async with cluster(*workers(Engine()), answer_cache=config(pool)) as client:
        deep = b'{"model":"fake","messages":[{"role":"user","content":"w"}],"answer_cache":true,'
        body = deep + b'"x":' + b"[" * 600 + b"]" * 600 + b"}"
        reply = await client.post("/v1/chat/completions", body)
        assert (reply.status, "nested too deeply" in reply.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_stored_answers_in_other_apis(cluster: Cluster, pool: str, stream: bool) -> None:
    engine = Engine()
    async with cluster(*workers(engine), answer_cache=config(pool, always=True)) as client:
        body = {"model": MODEL, "max_tokens": 9, "stream": stream}
        for question in ("what?", "what is it?"):
            messages = [{"role": "user", "content": question}]
            reply = await client.post("/v1/messages", {**body, "messages": messages})
            assert (reply.status, b"answer " in reply.body) == (200, True)
            assert (b"message_stop" in reply.body) == stream
            await stored(client, 1)
        for question in ("how?", "how is it?"):
            fields = {"model": MODEL, "input": question, "stream": stream}
            reply = await client.post("/v1/responses", fields)
            assert (reply.status, b"answer " in reply.body) == (200, True)
            assert (b"response.completed" in reply.body) == stream
            await stored(client, 2)
        assert engine.answered == 2
