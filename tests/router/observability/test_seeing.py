"""What operators see of requests: histograms, spans."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

import router.server.run as server
from eval.fake_worker.worker import FakeWorker
from router.observability.counting import Histograms
from router.observability.tracing import Tracing

from ..conftest import CHAT_BODY, Client, Cluster
from ..scripts import answering, failing, gated

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_histogram_reads_as_prometheus_own() -> None:
    registry = CollectorRegistry()
    seen = Histograms("h", "told", ("route",), (0.1, 1), registry)
    for value in (0.1, 0.5, 7.0):
        seen.of("local").observe(value)
    lines = generate_latest(registry).decode().splitlines()
    assert lines[1:] == [
        "# TYPE h histogram",
        'h_bucket{le="0.1",route="local"} 1.0',
        'h_bucket{le="1.0",route="local"} 2.0',
        'h_bucket{le="+Inf",route="local"} 3.0',
        'h_count{route="local"} 3.0',
        'h_sum{route="local"} 7.6',
    ]


async def test_times_are_labelled_by_route_reason_and_turn(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    async with cluster(p, d) as client:
        contents = ["hello"]
        for _ in range(4):
            await client.chat(*contents, stream=True)
            contents += ["www", "and"]
        kinds = [
            {"route": "remote", "reason": "first_turn", "turn": "1"},
            {"route": "local", "reason": "policy_full", "turn": "2"},
            {"route": "local", "reason": "policy_full", "turn": "3+"},
        ]
        for name in ("ttft", "tpot", "e2e"):
            counts = [await client.metric(f"ppd_{name}_seconds_count", **kind) for kind in kinds]
            assert counts == [1, 1, 2], name
        assert await client.metric("ppd_transfer_tokens_avoided_total") == 300


async def test_kv_that_was_not_sent_is_counted_in_bytes_where_the_worker_reports_their_size(
    cluster: Cluster,
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    d.kv_token_bytes = 1536
    async with cluster(p, d) as client:
        await client.chat("hello")
        assert await dashboard(client) is None
        await client.chat("hello", "www", "and")
        assert await client.metric("ppd_transfer_kv_bytes_total") == 100 * 1536, "of the first turn"
        assert await client.metric("ppd_transfer_kv_bytes_avoided_total") == 100 * 1536
        assert await dashboard(client) == 100 * 1536


async def test_kv_bytes_that_no_worker_reports_are_not_guessed(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    async with cluster(p, d) as client:
        await client.chat("hello")
        await client.chat("hello", "www", "and")
        assert await client.metric("ppd_transfer_tokens_avoided_total") == 100
        async with client.http.get(f"{client.url}/metrics") as answer:
            assert "\nppd_transfer_kv_bytes_avoided_total " not in await answer.text()


async def dashboard(client: Client) -> int | None:
    """Bytes of KV that local turns have spared, as the page tells them."""
    async with client.http.get(f"{client.url}/dashboard/state") as answer:
        reported: int | None = (await answer.json())["kv_bytes_avoided"]
        return reported


async def test_the_times_between_parts_of_a_stream_are_taken(cluster: Cluster) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    async with cluster(p, d) as client:
        body = {**CHAT_BODY, "stream": True}
        kind = {"route": "remote", "reason": "first_turn", "turn": "1"}
        async with client.http.post(f"{client.url}/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
            assert await client.metric("ppd_itl_seconds_count", **kind) == 0
            gate.set()
            await answer.read()
        assert await client.metric("ppd_itl_seconds_count", **kind) == 1


class StoredResponse(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


async def test_every_request_is_a_span_and_its_context_reaches_the_workers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = StoredResponse()
    monkeypatch.setattr(server, "Tracing", lambda endpoint, share: Tracing(endpoint, share, kept))
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    async with cluster(p, d, otlp_endpoint="http://127.0.0.1:1/v1/traces") as client:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        await client.post("/v1/chat/completions", body, {"traceparent": PARENT})
        sent = d.headers[-1]["traceparent"]
        d.script = failing(500, "no")
        await client.chat("other", stream=True)
        await client.post("/v1/chat/completions", {"messages": []})
    answered, failed, rejected = kept.spans
    assert answered.name == "POST /v1/chat/completions"
    assert answered.context is not None
    assert answered.parent is not None
    assert f"{answered.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{answered.parent.span_id:016x}" == PARENT.split("-")[2]
    assert sent.split("-")[1:3] == [PARENT.split("-")[1], f"{answered.context.span_id:016x}"]
    assert answered.attributes is not None
    assert answered.attributes["ppd.route"] == "remote"
    assert answered.attributes["gen_ai.usage.input_tokens"] == 100
    assert [one.name for one in answered.events] == ["first event"]
    assert not failed.status.is_ok
    assert rejected.attributes is not None
    assert rejected.attributes["ppd.outcome"] == "rejected"
