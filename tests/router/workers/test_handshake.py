"""The properties of a worker by its handshake, and the plugin's description in it."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eval.fake_worker.worker import FakeWorker
from ppd.contract import DESCRIPTION_VERSION, Role
from ppd.errors import WorkerError
from router.workers.handshake import check_ready, connect_server, fetch_loads
from router.workers.registry import WorkerRegistry
from router.workers.sglang import Handshake, handshake_of

from ..conftest import Cluster
from ..fixtures import workers
from ..scripts import answering

DESCRIPTION = {
    "version": DESCRIPTION_VERSION,
    "boot_id": "b",
    "local_prefill": True,
    "vocab_size": 4096,
    "flushes": 2,
    "kv_token_bytes": 512,
    "special_tokens": ["<x>"],
    "running": 3,
}


def handshake_with(state: dict[str, Any]) -> Handshake:
    info = {
        "disaggregation_mode": "decode",
        "disaggregation_bootstrap_port": 4321,
        "page_size": 16,
        "internal_states": [state],
    }
    return handshake_of("http://d:1", info, {"data": [{"id": "m", "max_model_len": 1000}]})


PLAIN = Handshake("decode", ("m",), 1000, 16, 4321)


async def test_a_redirect_is_not_followed() -> None:
    """It would lead a router out of the networks that its workers may be in."""
    reached = []

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/elsewhere", elsewhere)
    app.router.add_get("/{path:.*}", redirect)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(aiohttp.ClientError, match=r"not ready: .*/ready answered 302"):
            await check_ready(http, url)
        assert await fetch_loads(http, url, [None]) == [None]
    assert not reached


def test_of_several_ranks_one_describes_the_worker_in_any_order() -> None:
    """SGLang lists ranks in the order in which they answer; a restart has other names."""
    states: list[dict[str, Any]] = [{"ppd": {**DESCRIPTION, "boot_id": name}} for name in "cab"]
    found = set()
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        info = {
            "disaggregation_mode": "prefill",
            "disaggregation_bootstrap_port": 4321,
            "page_size": 16,
            "dp_size": 3,
            "internal_states": [states[i] for i in order],
        }
        handshake = handshake_of("http://p:1", info, {"data": [{"id": "m"}]})
        found.add((handshake.boot_id, handshake.dp_size))
    assert found == {("a", 3)}


def test_ranks_of_dp_attention_have_a_field_of_their_own() -> None:
    info = {
        "disaggregation_mode": "decode",
        "disaggregation_bootstrap_port": 4321,
        "page_size": 16,
        "dp_size": 1,
        "attn_dp_size": 2,
        "internal_states": [{}, {}],
    }
    assert handshake_of("http://d:1", info, {"data": [{"id": "m"}]}).dp_size == 2


def test_the_description_is_part_of_the_handshake() -> None:
    handshake = handshake_with({"ppd": DESCRIPTION})
    assert handshake == Handshake(
        role="decode",
        models=("m",),
        max_model_tokens=1000,
        page_size=16,
        bootstrap_port=4321,
        local_prefill=True,
        boot_id="b",
        vocab_size=4096,
        flushes=2,
        kv_token_bytes=512,
        special_tokens=("<x>",),
    )


@pytest.mark.parametrize("state", [{}, {"ppd": None}])
def test_a_worker_without_the_plugin_is_a_plain_one(state: dict[str, Any]) -> None:
    assert handshake_with(state) == PLAIN


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        pytest.param({**DESCRIPTION, "version": "0.1.0"}, "has version '0.1.0'", id="older"),
        pytest.param({**DESCRIPTION, "version": 0}, "has version 0", id="version 0"),
        pytest.param({**DESCRIPTION, "version": 99}, "has version 99", id="newer"),
        pytest.param({**DESCRIPTION, "version": True}, "has version True", id="no number"),
        pytest.param({"boot_id": "b", "local_prefill": True}, "has version None", id="no version"),
        pytest.param({}, "has version None", id="empty"),
        pytest.param(["ppd"], "has version None", id="no object"),
        pytest.param(
            {**DESCRIPTION, "boot_id": 7},
            f"of version {DESCRIPTION_VERSION} is malformed",
            id="type",
        ),
        pytest.param(
            {"version": DESCRIPTION_VERSION},
            f"of version {DESCRIPTION_VERSION} is malformed",
            id="incomplete",
        ),
    ],
)
def test_a_worker_with_an_unusable_description_is_a_plain_one(
    description: object, problem: str
) -> None:
    handshake = handshake_with({"ppd": description})
    assert handshake.description_problem is not None
    assert problem in handshake.description_problem
    assert not handshake.local_prefill
    assert handshake.boot_id is None
    assert handshake.special_tokens == ()


@pytest.mark.parametrize("info", [{}, [], None, {"internal_states": []}])
def test_an_answer_of_another_server_is_refused(info: object) -> None:
    with pytest.raises(WorkerError, match="is no SGLang server"):
        handshake_of("http://d:1", info, {"data": [{"id": "m"}]})


async def test_an_unusable_description_is_logged_once_for_each_url(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, d = workers()
    other = FakeWorker("prefill", answering(), description_version=99)
    d.description_version = "0.1.0"
    async with d.serving(), other.serving(), aiohttp.ClientSession() as control:
        registry = WorkerRegistry(control)
        registry.join(await connect_server(control, Role.DECODE, d.url))
        registry.join(await connect_server(control, Role.PREFILL, other.url))
        for server in list(registry.servers):
            server.alive = False
            await registry.check(server)
        registry.leave(registry.servers[0])
        registry.join(await connect_server(control, Role.DECODE, d.url))
    found = f"has version '0.1.0', expected {DESCRIPTION_VERSION}"
    text = f"decode worker {d.url} is served as a plain PD worker: its description {found}"
    assert caplog.text.count(text) == 1
    assert caplog.text.count(f"prefill worker {other.url} is served as a plain PD worker") == 1
    assert "does not offer local prefill" not in caplog.text, "one log line for a worker"


async def test_turns_of_a_worker_with_an_unusable_description_are_remote(cluster: Cluster) -> None:
    p, d = workers()
    d.description_version = DESCRIPTION_VERSION + 1
    async with cluster(p, d) as client:
        assert (await client.chat("hello")).route == ("remote", "first_turn")
        assert (await client.chat("hello", "www", "and")).route[0] == "remote"
        shown = (await client.workers())[d.url]["handshake"]
        assert (shown["local_prefill"], shown["boot_id"]) == (False, None)
