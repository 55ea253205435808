"""Nothing is kept, charged or counted twice of a request, however it ends."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from eval.dialects import DONE, event
from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from router.config.limits import AdmissionLimits, RateLimit, Tenant
from tests.waiting import HANG_S

from ..conftest import CHAT_BODY, Client, Cluster
from ..scripts import answering, failing, gated, hanging

CHAT = "/v1/chat/completions"


async def until(client: Client, value: float, name: str, **labels: str) -> None:
    async def poll() -> None:
        while await client.metric(name, **labels) != value:
            pass

    await asyncio.wait_for(poll(), HANG_S)


async def finished(client: Client, outcome: str, endpoint: str = CHAT) -> float:
    return await client.metric("ppd_finished_total", endpoint=endpoint, outcome=outcome)


async def test_a_prompt_too_short_to_count_leaves_nothing_behind(cluster: Cluster) -> None:
    """Its tokens are forecast as none; two at a time, as each takes its own off again."""
    p, d = FakeWorker("prefill", hanging), FakeWorker("decode", hanging)
    async with cluster(p, d, admission=AdmissionLimits(max_in_flight=2)) as client:
        for _ in range(3):
            both = [
                asyncio.create_task(client.post("/v1/completions", {"prompt": "hi"}))
                for _ in range(2)
            ]
            await until(client, 2, "ppd_worker_in_flight", role="decode", worker=d.url)
            for one in both:
                one.cancel()
            for engine in (p, d):
                await until(client, 0, "ppd_worker_in_flight", role=engine.role, worker=engine.url)
        assert await finished(client, "disconnected", "/v1/completions") == 6


async def test_nobody_without_a_key_gets_a_large_body_read(cluster: Cluster) -> None:
    """On any path; the answer comes before the body: its client is still sending."""
    digest = hashlib.sha256(b"k").hexdigest()
    async with cluster(
        *(FakeWorker(role, answering()) for role in ("prefill", "decode")),
        tenants={"a": Tenant(keys=(digest,))},
        admin_token="operator",
    ) as client:

        async def ask(path: str, *headers: str, limit_s: float = 10.0) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            length = "Content-Length: 1000000"
            lines = [f"POST {path} HTTP/1.1", "Host: r", length, *headers, "", ""]
            writer.write("\r\n".join(lines).encode())
            try:
                async with asyncio.timeout(limit_s):
                    return await reader.read()
            except TimeoutError:
                return b"reads on"
            finally:
                writer.close()

        for path in (CHAT, "/v1/embeddings", f"/explain{CHAT}", "/nonsense"):
            answer = await ask(path)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b'"code":"invalid_api_key"' in answer
        assert b'"type":"authentication_error"' in await ask("/v1/messages")
        for secret in ("k", "operator"):
            header = f"Authorization: Bearer {secret}"
            assert await ask(CHAT, header, limit_s=0.5) == b"reads on"
        assert await finished(client, "rejected", "") == 5


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_what_is_nested_too_deeply_is_refused_and_counted(
    cluster: Cluster, path: str
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d) as client:
        schema = b'{"a":' * 300 + b"1" + b"}" * 300
        tool = b'{"type": "function", "name": "f", "input_schema": %b, "parameters": %b}'
        body = b'{"max_tokens": 9, "input": "x", "tools": [%b], "messages": %b}' % (
            tool % (schema, schema),
            b'[{"role": "user", "content": "x"}]',
        )
        reply = await client.post(path, body)
        assert (reply.status, b"nested too deeply" in reply.body) == (400, True)
        assert await finished(client, "rejected", path) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_are_counted_once_each(cluster: Cluster, stream: bool) -> None:
    p, d = FakeWorker("prefill", hanging), FakeWorker("decode", hanging)
    async with cluster(p, d) as client:
        asked = asyncio.create_task(client.chat("hello", n=3, stream=stream))
        await until(client, 3, "ppd_worker_in_flight", role="decode", worker=d.url)
        asked.cancel()
        await until(client, 3, "ppd_finished_total", endpoint=CHAT, outcome="disconnected")
        await until(client, 0, "ppd_worker_in_flight", role="decode", worker=d.url)
        assert await finished(client, "disconnected") == 3


async def test_nobody_is_charged_for_what_was_not_served(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", failing(500, "no"))
    limits = AdmissionLimits(max_in_flight=1, max_waiting=0)
    rate = RateLimit(requests_per_minute=3, tokens_per_minute=2000)
    async with cluster(p, d, admission=limits, rate=rate) as client:
        for _ in range(9):  # no worker has spoken
            assert (await client.chat("hello")).status == 500
        gate = asyncio.Event()
        d.script = gated(gate)
        first = asyncio.create_task(client.chat("hello", stream=True))
        await until(client, 1, "ppd_worker_in_flight", role="decode", worker=d.url)
        for _ in range(9):  # the queue is full
            refused = await client.chat("hello")
            assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
        gate.set()
        assert (await first).status == 200


def many(completion: int) -> Any:
    """A batch as ``/generate`` answers it: a list, or events that say which prompt they are of."""

    async def script(request: Request) -> None:
        meta = {"prompt_tokens": 10, "completion_tokens": completion, "cached_tokens": 0}
        answers = [
            {"text": "x", "index": i, "meta_info": meta} for i in range(len(request.body["text"]))
        ]
        if not request.body.get("stream"):
            request.answer(answers)
            return
        for one in answers:
            request.send(event(one))
        request.send(DONE)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_all_prompts_of_a_batch_are_charged(cluster: Cluster, stream: bool) -> None:
    p, d = FakeWorker("prefill", many(1000)), FakeWorker("decode", many(1000))
    async with cluster(p, d, rate=RateLimit(tokens_per_minute=3000)) as client:
        body = {"text": ["abc"] * 10, "stream": stream, "sampling_params": {"max_new_tokens": 9}}
        assert (await client.post("/generate", body)).status == 200
        assert (await client.post("/generate", body)).status == 429


async def test_a_hung_prefill_worker_is_blamed_once_and_alone(cluster: Cluster) -> None:
    """Both legs are silent at the same time, in no certain order."""
    for _ in range(6):
        p, d = FakeWorker("prefill", hanging), FakeWorker("decode", hanging)
        limits = {"answer_timeout_s": 0.05, "breaker_failures": 1, "breaker_open_s": 60.0}
        async with cluster(p, d, **limits) as client:
            assert (await client.chat("hello")).status == 504
            opened = [
                await client.metric("ppd_worker_breaker_open", role=e.role, worker=e.url)
                for e in (p, d)
            ]
            assert opened == [1, 0]
            assert await client.metric("ppd_prefill_errors_total") == 1


async def test_freed_kv_is_given_to_as_many_as_it_holds(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    d.free_tokens = 10_000
    async with cluster(p, d, probe_interval_s=0.05) as client:
        first = asyncio.create_task(client.chat("hello", stream=True, max_tokens=250))
        await until(client, 1, "ppd_worker_in_flight", role="decode", worker=d.url)
        d.free_tokens = 10
        await d.load_is_known()
        waiting = [
            asyncio.create_task(client.chat(f"{i}", stream=True, max_tokens=250)) for i in range(20)
        ]
        await until(client, 20, "ppd_admission_waiting")
        d.free_tokens = 600
        await until(client, 18, "ppd_admission_waiting")
        await d.load_is_known()  # which says 600 still: what was sent counts against it
        gate.set()
        d.free_tokens = 10_000
        assert {(await one).status for one in (first, *waiting)} == {200}


async def test_a_worker_that_tells_its_load_no_more_is_not_full_for_good(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    d.free_tokens = 10
    async with cluster(p, d) as client:
        await d.load_is_known()
        first = asyncio.create_task(client.chat("hello", stream=True))
        await until(client, 1, "ppd_worker_in_flight", role="decode", worker=d.url)
        second = asyncio.create_task(client.chat("other", stream=True))
        await until(client, 1, "ppd_admission_waiting")
        d.free_tokens = None
        await until(client, 2, "ppd_worker_in_flight", role="decode", worker=d.url)
        gate.set()
        assert [(await one).status for one in (first, second)] == [200, 200]


async def test_a_resumed_completion_keeps_the_default_limit(cluster: Cluster) -> None:
    from ..scripts import InTurn
    from ..serving.test_resume import cut_off

    def piece(text: str) -> bytes:
        return event({"id": "c", "choices": [{"index": 0, "text": text}]})

    decode = InTurn(cut_off(1, *[piece("w ")] * 15), answering())
    decoders = [FakeWorker("decode", decode) for _ in range(2)]
    async with cluster(FakeWorker("prefill", answering()), *decoders, resume_streams=1) as client:
        await client.post("/v1/completions", {"prompt": "count: ", "stream": True})
        assert decode.bodies[-1]["max_tokens"] == 1


async def test_a_model_that_is_looked_up_by_head_is_there(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(p, d, admin_token="s3cret") as client:
        async with client.http.head(f"{client.url}/health") as answer:
            assert answer.status == 200
        assert (await client.post(CHAT, CHAT_BODY)).status == 200
