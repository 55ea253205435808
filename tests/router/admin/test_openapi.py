"""``/openapi.json``: every route and no other is in it, it is valid, and responses match it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from eval.cluster import free_port
from eval.fake_worker.worker import FakeWorker
from ppd.announcement import Announcement
from ppd.contract import Role
from router.admin.app import admin_app, public_app
from router.admin.endpoints import OPERATIONS, Access
from router.admin.openapi import document, routes_of
from router.admin.peer_state import WorkerChanges
from router.apis.front import PATHS
from router.config.options import RouterConfig, Secrets
from router.observability.journal import Journal, opened_by
from router.peers import Peers
from router.server.models import make_policies, tables_of
from router.server.parts import make_parts
from router.wire.client import Upstreams
from router.workers.membership import Membership
from router.workers.registry import WorkerRegistry

from ..conftest import CHAT_BODY, Client, Cluster
from ..fixtures import model_workers
from ..scripts import answering

# The router's own headers, in every generated answer.
ROUTE_HEADERS = {"X-PPD-Route", "X-PPD-Reason", "X-PPD-Turn"}


@asynccontextmanager
async def applications() -> AsyncIterator[tuple[web.Application, web.Application]]:
    """The public and the operators' application of a router with every feature that adds routes."""
    config = RouterConfig(accept_workers=True)
    registry = WorkerRegistry(control=None)  # type: ignore[arg-type]
    for worker in model_workers(prefill=1, decode=1).workers:
        registry.join(worker.server)
    peers = Peers(0, {}, "secret")
    policies = make_policies(config, registry)
    upstreams = Upstreams(connect_s=1, answer_s=1, idle_s=1, reuse_s=1)
    membership = Membership(
        registry, roles=config.roles, token="", peers=peers, budget_s=1, clock=lambda: 0.0
    )
    async with aiohttp.ClientSession() as http:
        parts = make_parts(
            config,
            policies,
            registry,
            Journal("", opened_by(config, tables_of(policies))),
            upstreams,
            Secrets.of(config),
            None,
            http,
            http,
            peers,
            WorkerChanges(),
        )
        kinds = (parts.passthrough, parts.stored_responses)
        public = public_app(parts.catalog, parts.admin, *kinds, 1)
        operators = admin_app(
            parts.catalog, parts.admin, parts.operations, *kinds, membership, "", peers, 1
        )
        yield public, operators
        await upstreams.close()


def paths_of(described: dict[str, Any]) -> set[str]:
    """Every ``METHOD PATH`` of a document."""
    return {
        f"{method.upper()} {path}" for path, item in described["paths"].items() for method in item
    }


async def test_every_route_is_described_and_no_other() -> None:
    async with applications() as (public, operators):
        for app, token_paths in ((public, PATHS), (operators, PATHS), (operators, ())):
            routes = routes_of(app, token_paths)
            assert len(routes) == len(set(routes))
            assert paths_of(document(routes)) == set(routes)
            assert set(token_paths) <= {route.split(" ")[1] for route in routes}
        assert set(routes_of(operators, PATHS)) == set(OPERATIONS)


@pytest.mark.parametrize("access", [None, Access.CLIENT])
def test_the_document_is_valid_openapi(access: Access | None) -> None:
    routes = [name for name, one in OPERATIONS.items() if access in (None, one.access)]
    described = document(routes)
    validate(described)
    assert described["openapi"].startswith("3.1")


def test_every_field_of_a_structure_has_a_type_or_a_description() -> None:
    for name, schema in document(OPERATIONS)["components"]["schemas"].items():
        assert schema["description"], name
        for field, described in schema.get("properties", {}).items():
            assert described.keys() & {"type", "$ref", "anyOf", "enum", "description"}, (
                name,
                field,
            )


def workers() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))


async def fetched(client: Client, url: str, path: str, **how: Any) -> tuple[int, Any]:
    async with client.http.get(url + path, **how) as response:
        return response.status, await response.json()


async def test_each_port_has_a_document_of_its_own_for_everybody(cluster: Cluster) -> None:
    port = free_port()
    inner = f"http://127.0.0.1:{port}"
    async with cluster(*workers(), admin_port=port, admin_token="s3cret") as client:
        _, public = await fetched(client, client.url, "/openapi.json")
        status, operators = await fetched(client, inner, "/openapi.json")
    assert status == 200
    for described in (public, operators):
        validate(described)
    assert "POST /v1/chat/completions" in paths_of(public) - paths_of(operators)
    assert "GET /workers" in paths_of(operators) - paths_of(public)


def conforms(described: dict[str, Any], route: str, status: str, body: Any) -> None:
    """Check a response's body against the document."""
    method, path = route.split(" ")
    response = described["paths"][path][method.lower()]["responses"][status]
    schema = response["content"]["application/json"]["schema"]
    OAS31Validator({**schema, "components": described["components"]}).validate(body)


async def test_responses_are_as_the_document_has_them(cluster: Cluster, table: Path) -> None:
    prefill, decode = workers()
    options = {"policy": "ppd", "table": str(table), "corrections": frozenset({"shrinkage"})}
    async with cluster(prefill, decode, accept_workers=True, **options) as client:
        _, described = await fetched(client, client.url, "/openapi.json")
        reply = await client.chat("hello")
        success = described["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
        assert set(success["headers"]) == ROUTE_HEADERS <= set(reply.headers)
        await client.chat("hello " * 40, stream=True)
        await client.chat("hello " * 40, "www", "on", stream=True)
        for path in ("/health", "/v1/models", "/workers", "/explain", "/table"):
            status, body = await fetched(client, client.url, path)
            assert status == 200, path
            conforms(described, f"GET {path}", "200", body)
        _, card = await fetched(client, client.url, "/v1/models/fake")
        conforms(described, "GET /v1/models/{model}", "200", card)
        explained = await client.post("/explain/v1/chat/completions", CHAT_BODY)
        conforms(described, "POST /explain/v1/chat/completions", "200", explained.json)
        reset = await client.post("/table/reset", {})
        conforms(described, "POST /table/reset", "200", reset.json)
        name = decode.url.removeprefix("http://")
        drained = await client.post(f"/workers/{name}/drain", {})
        conforms(described, "POST /workers/{id}/drain", "200", drained.json)
        hello = Announcement(url=decode.url, role=Role.DECODE, boot_id=decode.boot_id)
        announced = await client.post("/workers", _plain(hello))
        conforms(described, "POST /workers", "200", announced.json)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            refused = await client.post(path, b"[]")
            assert refused.status == 400
            conforms(described, f"POST {path}", "4XX", refused.json)


def _plain(announcement: Announcement) -> dict[str, Any]:
    return {name: getattr(announcement, name) for name in ("url", "role", "boot_id")}
