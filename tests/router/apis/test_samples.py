"""Several samples in one answer, and embeddings."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import openai
import pytest

from eval.dialects import DONE, event
from eval.fake_worker.request import Request
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from router.config.limits import RateLimit, Tenant

from ..conftest import Cluster
from ..scripts import answering, failing, hanging, usage
from .clients import by_openai, replying, running_cluster


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_are_one_answer(cluster: Cluster, stream: bool) -> None:
    async with running_cluster(cluster, replying("four")) as (client, d), by_openai(client) as api:
        fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3}
        if stream:
            texts = ["", "", ""]
            counted = []
            async for chunk in await api.chat.completions.create(
                **fields, seed=7, stream=True, stream_options={"include_usage": True}
            ):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                counted += [chunk.usage] if chunk.usage else []
            (total,) = counted
        else:
            answer = await api.chat.completions.create(**fields, seed=7)
            texts = [str(choice.message.content) for choice in answer.choices]
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            total = answer.usage
        assert texts == ["four"] * 3
        assert (total.prompt_tokens, total.completion_tokens) == (100, 15)
        assert sorted(body["seed"] for body in d.bodies) == [7, 8, 9]
        assert {body["n"] for body in d.bodies} == {1}


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_of_several_prompts_are_numbered_by_prompt(
    cluster: Cluster, stream: bool
) -> None:
    """Choices of a prompt are together, as SGLang and OpenAI number them."""

    async def script(request: Request) -> None:
        texts = [f"{prompt}{request.body['seed']}" for prompt in request.body["prompt"]]
        choices = [{"index": at, "text": text} for at, text in enumerate(texts)]
        if not request.body.get("stream"):
            request.answer({"choices": choices, "usage": usage(4, 2, 0)})
            return
        for choice in reversed(choices):
            request.send(event({"choices": [choice]}))
        request.send(event({"choices": [], "usage": usage(4, 2, 0)}) + DONE)

    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", script)
    async with cluster(p, d) as client:
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "seed": 0, "stream": stream}
        reply = await client.post("/v1/completions", body)
        answers = reply.events if stream else [reply.json]
        choices = [one for answer in answers for one in answer["choices"]]
        if not stream:
            assert [one["index"] for one in choices] == [0, 1, 2, 3]
        texts = {one["index"]: one["text"] for one in choices}
        assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_a_failed_sample_fails_the_request(cluster: Cluster) -> None:
    async with (
        running_cluster(cluster, failing(500, "oom")) as (client, _),
        by_openai(client) as api,
    ):
        with pytest.raises(openai.InternalServerError, match="oom"):
            await api.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], n=2
            )


async def test_the_samples_of_a_request_are_bounded_in_bytes(cluster: Cluster) -> None:
    async with running_cluster(cluster, replying("four"), max_body_bytes=10_000) as (client, d):
        assert (await client.chat("x" * 3000, n=3)).status == 200
        reply = await client.chat("x" * 3000, n=4)
        assert (reply.status, reply.json["error"]["param"]) == (413, "n")
        assert len(d.bodies) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_sample_cancels_the_others(cluster: Cluster, stream: bool) -> None:
    waiting, cancelled = asyncio.Barrier(3), asyncio.Barrier(3)

    async def script(request: Request) -> None:
        await waiting.wait()
        if request.body["seed"] == 8:
            await failing(400, "not that one")(request)
            return
        try:
            await hanging(request)
        finally:
            await cancelled.wait()

    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", script)
    async with cluster(p, d) as client:
        reply = await client.chat("hello", n=3, seed=7, stream=stream)
        assert (reply.status, b"not that one" in reply.body) == (400, True)
        await cancelled.wait()


async def test_embeddings_are_sent_to_the_workers_that_serve_them(cluster: Cluster) -> None:
    async def embed(request: Request) -> None:
        vector = [0.5] * len(request.body["input"])
        data = [{"object": "embedding", "index": 0, "embedding": vector}]
        request.answer({"object": "list", "model": "e", "data": data, "usage": {}})

    embedder = FakeWorker("null", embed)
    async with embedder.serving():
        options = {"embedding": (embedder.url,), "worker_api_key": "inner"}
        limited = {**options, "rate": RateLimit(requests_per_minute=1)}
        async with running_cluster(cluster, replying("x"), **limited) as (client, _):
            body = {"model": "e", "input": "abc"}
            for _ in range(2):  # the bucket has refilled a little
                assert (await client.post("/v1/embeddings", body)).status == 200
            refused = await client.post("/v1/embeddings", body)
            assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
            at = {"endpoint": "/v1/embeddings"}
            assert await client.metric("ppd_finished_total", **at, outcome="ok") == 2
            assert await client.metric("ppd_finished_total", **at, outcome="overloaded") == 1
        async with running_cluster(cluster, replying("x"), **options) as (client, _):
            async with by_openai(client) as api:
                answer = await api.embeddings.create(
                    model="e", input="abc", encoding_format="float"
                )
            assert answer.data[0].embedding == [0.5] * 3
            assert embedder.headers[-1]["authorization"] == "Bearer inner"
    # The worker has stopped; the router serves without it.
    async with running_cluster(cluster, replying("x"), embedding=(embedder.url,)) as (client, _):
        reply = await client.post("/v1/embeddings", {"model": "e", "input": "abc"})
        assert (reply.status, reply.json["error"]["type"]) == (503, "worker_error")


@pytest.mark.parametrize(
    ("worker_key", "status", "answered", "outcome"),
    [
        ("", 400, 400, "rejected"),
        ("", 401, 401, "rejected"),
        ("inner", 401, 503, "worker_error"),
        ("", 429, 429, "overloaded"),
        ("", 500, 500, "worker_error"),
    ],
)
async def test_the_outcome_of_failed_embeddings(
    cluster: Cluster, worker_key: str, status: int, answered: int, outcome: str
) -> None:
    async def refuse(request: Request) -> None:
        request.answer({"message": "no"}, status=status, headers={"Retry-After": "7"})

    embedder = FakeWorker("null", refuse)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(embedder.serving())
        options = {"embedding": (embedder.url,), "worker_api_key": worker_key}
        ours = running_cluster(cluster, replying("x"), **options)
        client, _ = await stack.enter_async_context(ours)
        reply = await client.post("/v1/embeddings", {"input": "abc"})
        assert reply.status == answered
        assert reply.headers.get("Retry-After") == (None if answered == 503 else "7")
        at = {"endpoint": "/v1/embeddings", "outcome": outcome}
        assert await client.metric("ppd_finished_total", **at) == 1


async def test_requests_for_embeddings_are_scrubbed(cluster: Cluster) -> None:
    tenants = {"a": Tenant(keys=(sha256(b"KEY").hexdigest(),))}
    async with running_cluster(cluster, replying("x"), tenants=tenants) as (client, d):
        key = {"Authorization": "Bearer KEY"}
        body = {"input": "abc", "rid": "r", "bootstrap_host": "evil", "routed_dp_rank": 1}
        assert (await client.post("/v1/embeddings", body, key)).status == 200
        assert d.bodies[-1] == {"input": "abc", "rid": "a/r/", "cache_salt": "a"}
        for wrong in (b"[]", b"no JSON"):
            reply = await client.post("/v1/embeddings", wrong, key)
            assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
        assert len(d.bodies) == 1
