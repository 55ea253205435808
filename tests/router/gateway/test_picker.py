"""The endpoint picker: real gRPC, a gateway as Envoy is, fake workers behind it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    ProtocolConfiguration,
)

from eval.dialects import DONE
from eval.fake_worker.worker import FakeWorker
from ppd.contract import Refusal, RefusalReason
from ppd.errors import ConfigError
from router.config.gateway import GatewayConfig
from router.config.limits import AdmissionLimits, Tenant
from router.config.options import RouterConfig

from ..conftest import Client, Cluster, new_certificate
from ..fixtures import CHAT, LATER, chat, until, workers
from ..scripts import answering, ending_early, failing, gated, hanging, streaming_forever, token
from .envoy import (
    DESTINATION,
    PREFILL,
    Gateway,
    gateway,
    header_map,
    metadata,
    request_head,
    streamed,
)

Behind = Callable[..., AbstractAsyncContextManager[tuple[Gateway, Client]]]


@pytest.fixture
def behind(cluster: Cluster, table: Path, caplog: pytest.LogCaptureFixture) -> Behind:
    """``async with behind(prefill, decode, ...) as (gateway, client)``: all of it, running."""

    @asynccontextmanager
    async def start(*engines: FakeWorker, **options: Any) -> AsyncIterator[tuple[Gateway, Client]]:
        caplog.set_level(logging.INFO, "ppd.router")
        policy = {"policy": "ppd", "table": str(table), "gateway": GatewayConfig(port=0)}
        async with AsyncExitStack() as stack:
            running = cluster(*engines, **{**policy, **options})
            client = await stack.enter_async_context(running)
            yield await stack.enter_async_context(gateway(picker_port(caplog))), client
            await until(lambda: _idle(client))

    return start


def picker_port(caplog: pytest.LogCaptureFixture) -> int:
    return int(re.findall(r"gateways: 127\.0\.0\.1:(\d+)", caplog.text)[-1])


async def _idle(client: Client) -> bool:
    """Whether nothing is counted as in flight."""
    return all(one["in_flight"] == 0 for one in (await client.workers()).values())


def _host(worker: FakeWorker) -> str:
    return f"127.0.0.1:{worker.port}"


async def test_turns_go_through_the_prefill_worker_or_are_local(behind: Behind) -> None:
    p, d = workers()
    async with behind(p, d) as (envoy, client):
        first = await envoy.post(CHAT, chat("hello"))
        assert first.status == 200
        assert first.json["usage"]["prompt_tokens"] == 100
        assert (first.destination, first.sent[PREFILL]) == (_host(d), _host(p))
        assert first.metadata == {"envoy.lb": {DESTINATION: _host(d)}}
        assert "custom_params" not in first.fields
        assert first.headers["x-ppd-route"] == "remote"
        second = await envoy.post(CHAT, chat(*LATER))
        assert second.route == ("local", "table")
        assert second.headers["x-ppd-turn"] == "2"
        assert (second.destination, second.sent.get(PREFILL)) == (_host(d), None)
        assert second.fields["custom_params"] == {"do_local_prefill": True, "min_cached_tokens": 0}
        assert (len(p.legs), len(d.legs)) == (1, 2)
        counted = {"endpoint": CHAT, "route": "local", "reason": "table"}
        assert await client.metric("ppd_turns_total", **counted) == 1
        assert await client.metric("ppd_finished_total", endpoint=CHAT, outcome="ok") == 2


async def test_turns_of_a_server_with_ranks_stay_remote(behind: Behind) -> None:
    """The sidecar chooses the rank of a remote turn, so the next one cannot be sent to it."""
    p, d = workers()
    d.dp_size = 2
    async with behind(p, d) as (envoy, client):
        assert (await envoy.post(CHAT, chat("hello"))).route == ("remote", "first_turn")
        second = await envoy.post(CHAT, chat(*LATER))
        assert second.route == ("remote", "unknown_rank")
        assert (second.destination, second.sent[PREFILL]) == (_host(d), _host(p))
        assert "routed_dp_rank" not in second.fields
        # A client of the router itself has its turns on the rank.
        await client.chat("bye")
        await client.chat("bye", "www", "and")
        assert d.bodies[-1]["routed_dp_rank"] == d.bodies[-2]["routed_dp_rank"]


async def test_clients_of_the_gateway_and_of_the_router_share_conversations(
    behind: Behind,
) -> None:
    async with behind(*workers()) as (envoy, client):
        await client.chat("hello")
        assert (await envoy.post(CHAT, chat(*LATER))).route == ("local", "table")


@pytest.mark.parametrize("asked", [False, True])
async def test_streams_pass_and_show_usage_to_those_who_ask(behind: Behind, asked: bool) -> None:
    fields: dict[str, Any] = {"stream": True}
    if asked:
        fields["stream_options"] = {"include_usage": True}
    async with behind(*workers()) as (envoy, client):
        seen = await envoy.post(CHAT, chat("hello", **fields))
        assert seen.body.endswith(DONE)
        assert [f"w{i}".encode() in seen.body for i in range(3)] == [True] * 3
        assert (b'"usage":{' in seen.body) is asked
        assert (await envoy.post(CHAT, chat(*LATER))).route == ("local", "table")
        ttft = {"route": "remote", "reason": "first_turn", "turn": "1"}
        assert await client.metric("ppd_ttft_seconds_count", **ttft) == 1


async def test_long_bodies_in_parts_with_trailers(behind: Behind) -> None:
    p, d = workers()
    text = "word " * 60_000
    async with behind(p, d) as (envoy, _):
        seen = await envoy.post(CHAT, chat(text), parts=7, trailers=True)
        assert seen.fields["messages"][0]["content"] == text
        assert d.bodies[-1]["messages"][0]["content"] == text


async def test_other_endpoints_of_the_engine(behind: Behind) -> None:
    async with behind(*workers()) as (envoy, _):
        done = await envoy.post("/v1/completions", {"model": "fake", "prompt": "a b c"})
        assert done.headers["x-ppd-route"] == "remote"
        body = {"text": "a b c", "sampling_params": {"max_new_tokens": 4}}
        await envoy.post("/generate", body)
        again = await envoy.post("/generate", {**body, "text": "a b c" + "d" * 40})
        assert again.status == 200


async def test_models_come_from_a_decode_worker_and_nothing_else_passes(behind: Behind) -> None:
    p, d = workers()
    async with behind(p, d, worker_api_key="sk-workers") as (envoy, _):
        seen = await envoy.get("/v1/models")
        assert (seen.destination, seen.status) == (_host(d), 200)
        assert seen.json["data"][0]["id"] == "fake"
        assert seen.sent["authorization"] == "Bearer sk-workers"
        for path in ("/flush_cache", "/tokenize", "/v1/chat/completion%73"):
            refused = await envoy.post(path, {"prompt": "a"})
            assert (refused.immediate, refused.status) == (True, 404), path


async def test_headers_that_engines_obey_do_not_pass(behind: Behind) -> None:
    headers = {"x-override-rank": "1", "x-api-key": "sk", "x-prefiller-url": "http://x"}
    async with behind(*workers()) as (envoy, _):
        seen = await envoy.post(CHAT, chat("hello"), headers)
        assert not headers.keys() & seen.sent.keys()


async def test_a_prefill_worker_has_no_backlog_once_its_turn_decodes(behind: Behind) -> None:
    gate = asyncio.Event()
    p, d = workers(gated(gate))
    async with behind(p, d) as (envoy, client):
        task = asyncio.create_task(envoy.post(CHAT, chat("hello " * 50, stream=True)))
        counted = {"endpoint": CHAT, "route": "remote", "reason": "first_turn"}
        await until(lambda: _at_least_one(client, **counted))
        assert (await client.workers())[p.url]["backlog_tokens"] == 0
        gate.set()
        await task


async def _at_least_one(client: Client, **labels: str) -> bool:
    return await client.metric("ppd_turns_total", **labels) >= 1


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "JSON"),
        (chat("hello", stream="yes"), 400, "stream"),
        (chat("hello", n=2), 400, "n must be 1 behind a gateway, got 2"),
        (b"[" + b" " * 3000 + b"]", 413, "larger than 2000 bytes"),
    ],
)
async def test_bad_requests_are_answered_and_go_nowhere(
    behind: Behind, body: object, status: int, named: str
) -> None:
    p, d = workers()
    async with behind(p, d, max_body_bytes=2000) as (envoy, _):
        seen = await envoy.post(CHAT, body)
        assert (seen.immediate, seen.status) == (True, status)
        assert named in seen.json["error"]["message"]
        assert seen.headers["content-type"] == "application/json"
        assert not d.legs


async def test_keys_are_checked_and_not_passed_on(behind: Behind) -> None:
    key = "a" * 40
    digest = hashlib.sha256(key.encode()).hexdigest()
    tenants = {"blue": Tenant(keys=(digest,))}
    async with behind(*workers(), tenants=tenants) as (envoy, _):
        refused = await envoy.post(CHAT, chat("hello"))
        assert (refused.immediate, refused.status) == (True, 401)
        served = await envoy.post(CHAT, chat("hello"), {"authorization": f"Bearer {key}"})
        assert served.status == 200
        assert "authorization" not in served.sent


async def test_overload_is_429(behind: Behind) -> None:
    gate = asyncio.Event()
    p, d = workers(gated(gate))
    limits = AdmissionLimits(max_in_flight=1, max_waiting=0)
    async with behind(p, d, admission=limits) as (envoy, _):
        first = asyncio.create_task(envoy.post(CHAT, chat("hello", stream=True)))
        await d.arrived.wait()
        refused = await envoy.post(CHAT, chat("other"))
        assert (refused.immediate, refused.status) == (True, 429)
        assert refused.headers["retry-after"].isdecimal()
        gate.set()
        await first


async def test_without_a_worker_it_is_503(behind: Behind) -> None:
    p, d = workers()
    async with behind(p, d) as (envoy, client):
        d.vanish()
        await until(lambda: _dead(client, d.url))
        seen = await envoy.post(CHAT, chat("hello"))
        assert (seen.immediate, seen.status) == (True, 503)


async def _dead(client: Client, url: str) -> bool:
    return not (await client.workers())[url]["alive"]


async def test_only_endpoints_of_the_subset_are_picked(behind: Behind) -> None:
    p, one = workers()
    two = FakeWorker("decode", answering())
    async with behind(p, one, two) as (envoy, _):
        home = (await envoy.post(CHAT, chat("hello"))).destination
        (other,) = {_host(one), _host(two)} - {home}
        moved = await envoy.post(CHAT, chat(*LATER), subset=[other])
        assert moved.destination == other
        assert moved.route == ("remote", "home_gone")
        stays = await envoy.post(CHAT, chat(*LATER), subset=[_host(one), _host(two)])
        assert stays.destination == other
        none = await envoy.post(CHAT, chat("hello"), subset=["127.0.0.1:1"])
        assert (none.immediate, none.status) == (True, 503)
        assert "the gateway allows" in none.json["error"]["message"]
        assert (await envoy.post(CHAT, chat("hello"), subset=[])).status == 503


async def test_clients_cannot_name_workers(behind: Behind) -> None:
    p, d = workers()
    forged = {DESTINATION: "127.0.0.1:1", PREFILL: "127.0.0.1:1"}
    async with behind(p, d) as (envoy, _):
        first = await envoy.post(CHAT, chat("hello"), forged)
        assert (first.destination, first.sent[PREFILL]) == (_host(d), _host(p))
        second = await envoy.post(CHAT, chat(*LATER), forged)
        assert second.route[0] == "local"
        assert (second.destination, second.sent.get(PREFILL)) == (_host(d), None)


async def test_a_sidecar_in_front_of_decode_workers(behind: Behind) -> None:
    options = GatewayConfig(port=0, decode_port=8001, prefill_header="x-prefill")
    p, d = workers()
    async with behind(p, d, gateway=options) as (envoy, client):
        seen = await envoy.post(CHAT, chat("hello"), picked_only=True)
        assert (seen.destination, seen.sent["x-prefill"]) == ("127.0.0.1:8001", _host(p))
        gone = {"endpoint": CHAT, "outcome": "disconnected"}
        await until(lambda: _counted(client, 1, **gone))


async def _counted(client: Client, count: int, **labels: str) -> bool:
    return await client.metric("ppd_finished_total", **labels) == count


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_workers_pass_and_are_counted(behind: Behind, stream: bool) -> None:
    p, d = workers(failing(500, "out of order"))
    async with behind(p, d, breaker_failures=1) as (envoy, client):
        seen = await envoy.post(CHAT, chat("hello", stream=stream))
        assert b"out of order" in seen.body
        assert seen.status == (200 if stream else 500)
        failed = {"endpoint": CHAT, "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **failed) == 1
        assert (await client.workers())[d.url]["breaker_open"]


async def test_a_refused_local_turn_is_counted_and_holds_nothing(behind: Behind) -> None:
    refusal = Refusal(RefusalReason.TOO_MANY_TOKENS)
    p, d = workers()
    async with behind(p, d) as (envoy, client):
        await envoy.post(CHAT, chat("hello"))
        d.script = failing(503, refusal.to_message())
        refused = await envoy.post(CHAT, chat(*LATER))
        assert refused.status == 503
        assert await client.metric("ppd_local_refused_total", reason="too_many_tokens") == 1
        d.script = answering()
        assert (await envoy.post(CHAT, chat(*LATER))).route == ("local", "table")


async def test_a_stream_that_breaks_off_is_truncated(behind: Behind) -> None:
    p, d = workers(ending_early)
    async with behind(p, d) as (envoy, client):
        seen = await envoy.post(CHAT, chat("hello", stream=True))
        assert b"one" in seen.body
        truncated = {"endpoint": CHAT, "outcome": "truncated"}
        await until(lambda: _counted(client, 1, **truncated))


async def test_a_client_that_leaves_frees_what_it_held(behind: Behind) -> None:
    p, d = workers(streaming_forever)
    async with behind(p, d) as (envoy, client):
        task = asyncio.create_task(envoy.post(CHAT, chat("hello", stream=True)))
        await until(lambda: _streams(client, d.url))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gone = {"endpoint": CHAT, "outcome": "disconnected"}
        await until(lambda: _counted(client, 1, **gone))


async def _streams(client: Client, url: str) -> bool:
    return bool((await client.workers())[url]["in_flight"])


async def test_a_worker_that_does_not_answer_is_blamed_with_504(behind: Behind) -> None:
    p, d = workers(hanging)
    async with behind(p, d, answer_timeout_s=0.2, breaker_failures=1) as (envoy, client):
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        body = HttpBody(body=orjson.dumps(chat("hello")), end_of_stream=True)
        await call.send(request_body=body)
        assert (await call.read()).request_headers is not None
        assert (await call.read()).request_body is not None
        answer = (await call.read()).immediate_response
        assert answer is not None
        assert answer.status is not None
        assert int(answer.status.code) == 504
        failed = {"endpoint": CHAT, "outcome": "worker_error"}
        assert await client.metric("ppd_finished_total", **failed) == 1


async def test_a_stream_that_stops_ends_within_its_time(behind: Behind) -> None:
    async with behind(*workers(), idle_timeout_s=0.2) as (envoy, client):
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        body = HttpBody(body=orjson.dumps(chat("hello", stream=True)), end_of_stream=True)
        await call.send(request_body=body)
        assert (await call.read()).request_headers is not None
        assert (await call.read()).request_body is not None
        head = {":status": "200", "content-type": "text/event-stream"}
        await call.send(response_headers=HttpHeaders(headers=header_map(head)))
        assert (await call.read()).response_headers is not None
        await call.send(response_body=HttpBody(body=token("one")))
        assert streamed((await call.read()).response_body).body == token("one")
        code, details = await call.ends()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details == "the gateway has sent nothing for 0.2 s"
        await until(lambda: _counted(client, 1, endpoint=CHAT, outcome="truncated"))


async def test_events_after_an_error_pass_whole(behind: Behind) -> None:
    async with behind(*workers()) as (envoy, client):
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        body = HttpBody(body=orjson.dumps(chat("hello", stream=True)), end_of_stream=True)
        await call.send(request_body=body)
        assert (await call.read()).request_headers is not None
        assert (await call.read()).request_body is not None
        head = {":status": "200", "content-type": "text/event-stream"}
        await call.send(response_headers=HttpHeaders(headers=header_map(head)))
        assert (await call.read()).response_headers is not None
        error = b'data: {"error": {"message": "out of order", "code": 500}}\n\n'
        seen = b""
        for part, end in ((error + b"data: [DO", False), (b"NE]\n\n", True)):
            await call.send(response_body=HttpBody(body=part, end_of_stream=end))
            seen += streamed((await call.read()).response_body).body
        assert seen == error + DONE
        await until(lambda: _counted(client, 1, endpoint=CHAT, outcome="worker_error"))


async def test_a_body_that_stops_is_408(behind: Behind) -> None:
    async with behind(*workers(), client_request_timeout_s=0.2) as (envoy, _):
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        answer = (await call.read()).immediate_response
        assert answer is not None
        assert answer.status is not None
        assert int(answer.status.code) == 408


async def test_modes_that_are_not_served_are_named(behind: Behind) -> None:
    async with behind(*workers()) as (envoy, _):
        call = envoy.call()
        modes = ProtocolConfiguration(request_body_mode=ProcessingModeBodySendMode.BUFFERED)
        head = HttpHeaders(headers=header_map({":path": CHAT}))
        await call.send(request_headers=head, protocol_config=modes)
        code, details = await call.ends()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "request_body_mode must be FULL_DUPLEX_STREAMED, not BUFFERED"


async def test_messages_out_of_order_are_named(behind: Behind) -> None:
    async with behind(*workers()) as (envoy, _):
        call = envoy.call()
        await call.send(request_body=HttpBody(body=b"{}", end_of_stream=True))
        assert await call.ends() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request_headers come first, not request_body",
        )
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        await call.send(response_headers=HttpHeaders())
        code, details = await call.ends()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "a request's body ends with response_headers"


async def test_an_answer_of_another_worker_is_passed_on_and_not_recorded(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind(*workers()) as (envoy, client):
        call = envoy.call()
        await call.send(**request_head({":method": "POST", ":path": CHAT}, None))
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "hello"}]}'
        await call.send(request_body=HttpBody(body=body, end_of_stream=True))
        assert (await call.read()).request_headers is not None
        assert (await call.read()).request_body is not None
        served = metadata("envoy.lb", {f"{DESTINATION}-served": "10.0.0.1:80"})
        head = HttpHeaders(headers=header_map({":status": "200"}))
        await call.send(response_headers=head, metadata_context=served)
        assert (await call.read()).response_headers is not None
        await call.send(response_body=HttpBody(body=b"{}", end_of_stream=True))
        passed = streamed((await call.read()).response_body)
        assert (passed.body, passed.end_of_stream) == (b"{}", True)
        await until(lambda: _counted(client, 1, endpoint=CHAT, outcome="ok"))
        assert "10.0.0.1:80 has answered instead of" in caplog.text
        assert (await envoy.post(CHAT, chat(*LATER))).headers["x-ppd-turn"] == "1"


async def test_the_service_has_the_routers_certificate(
    cluster: Cluster, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ppd.router")
    pem, key = certificate
    tls = {"tls_certificate": str(pem), "tls_key": str(key), "gateway": GatewayConfig(port=0)}
    async with cluster(*workers(), **tls):
        trusting = grpc.ssl_channel_credentials(pem.read_bytes())
        async with gateway(picker_port(caplog), trusting) as envoy:
            assert (await envoy.post(CHAT, chat("hello"))).status == 200
        new_certificate(pem, key)
        renewed = grpc.ssl_channel_credentials(pem.read_bytes())
        async with gateway(picker_port(caplog), renewed) as envoy:
            assert (await envoy.post(CHAT, chat("hello"))).status == 200
        key.write_text("half of a key")
        async with gateway(picker_port(caplog), renewed) as envoy:
            assert (await envoy.post(CHAT, chat("hello"))).status == 200
        assert "the certificate is not renewed" in caplog.text


async def test_without_grpc_the_extra_is_named(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in ("router.gateway.picker", "router.gateway.exchange"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"pip install '\.\[gateway\]'"):
        async with behind(*workers()):
            pass


async def test_a_port_that_is_taken_is_named(behind: Behind) -> None:
    p, d = workers()
    async with p.serving(), d.serving():
        with pytest.raises(ConfigError, match=rf"gateway: cannot listen on 127\.0\.0\.1:{p.port}"):
            async with behind(p, d, gateway=GatewayConfig(port=p.port)):
                pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"port": 70000}, "gateway.port must be 0..65535, got 70000"),
        ({"port": 1, "decode_port": 0}, "gateway.decode_port must be 1..65535"),
        ({"port": 1, "prefill_header": "X-P"}, "gateway.prefill_header must be lower-case"),
        ({"port": 1, "prefill_header": "a b"}, "gateway.prefill_header is no name of a header"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], named: str) -> None:
    config = RouterConfig(
        prefill=("http://p:1",), decode=("http://d:1",), gateway=GatewayConfig(**options)
    )
    assert named in "; ".join(config.problems())
