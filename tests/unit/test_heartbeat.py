"""Where a worker says it is, and that it goes on saying so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.announcement import Announcement, announce, parse
from ppd.contract import Role, WorkerDescription, WorkerLoad
from ppd.errors import ContractError
from sglang_patches import heartbeat
from sglang_patches.heartbeat import Address, Heartbeat


@pytest.mark.parametrize(
    ("address", "own", "seen"),
    [
        (Address("10.0.0.5", 3000), "http://10.0.0.5:3000", "http://10.0.0.5:3000"),
        (Address("0.0.0.0", 3000), "http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        (Address("fd00::5", 3000, "https"), "https://[fd00::5]:3000", "https://[fd00::5]:3000"),
        (Address("0.0.0.0", 3000, "http", "http://w:1"), "http://127.0.0.1:3000", "http://w:1"),
    ],
)
def test_addresses(address: Address, own: str, seen: str) -> None:
    """A router on this machine reaches a server that listens everywhere over the loopback."""
    assert address.own_url() == own
    assert address.as_seen_from("http://127.0.0.1:8000") == seen


def test_what_a_newer_worker_adds_is_skipped() -> None:
    data = b'{"url": "http://w:1", "role": "decode", "boot_id": "x", "moods": ["fine"]}'
    assert parse(data) == Announcement(url="http://w:1", role=Role.DECODE, boot_id="x")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"url": 3}', b"\xff"])
def test_a_malformed_announcement_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ContractError, match="no announcement"):
        parse(data)


STATE = {
    "version": 1,
    "plugin_version": "0.1.0",
    "local_prefill": True,
    "boot_id": "b",
    "running": 1,
    "waiting": 0,
    "append_tokens": 0,
    "kv_used_tokens": 5,
    "kv_total_tokens": 10,
    "decode_step_ms": None,
}
INFO = {
    "version": "0.5.21",
    "served_model_name": "m",
    "page_size": 1,
    "disaggregation_mode": "decode",
    "disaggregation_bootstrap_port": 8998,
    "internal_states": [{"ppd": STATE}],
}
CUT_SHORT = "CUT SHORT"


def odd_answers(last: str) -> Iterator[tuple[int, str]]:
    yield from ((500, "no"), (200, "no json"), (200, "{}"), (200, CUT_SHORT), (418, "\xff"))
    while True:
        yield 200, last


async def test_odd_answers_do_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own server, and of the router's."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    infos, replies = odd_answers(json.dumps(INFO)), odd_answers("{}")
    heard: list[dict[str, Any]] = []
    enough, goodbye = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request, status: int, text: str) -> web.StreamResponse:
        if text != CUT_SHORT:
            return web.Response(status=status, text=text)
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    async def own(request: web.Request) -> web.StreamResponse:
        return await answer(request, *next(infos))

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    async def router(request: web.Request) -> web.StreamResponse:
        heard.append(await request.json())
        if len(heard) == 8:
            enough.set()
        if heard[-1]["leaving"]:
            goodbye.set()
        return await answer(request, *next(replies))

    app = web.Application()
    app.router.add_get("/ready", ready)
    app.router.add_get("/server_info", own)
    app.router.add_post("/workers", router)
    async with TestServer(app) as server:
        assert server.port is not None
        beats = Heartbeat(
            Address("127.0.0.1", server.port), (str(server.make_url("")).rstrip("/"),), None, None
        )
        beats.start()
        await enough.wait()
        beats.leave()
        await goodbye.wait()
    assert {(sent["boot_id"], sent["role"]) for sent in heard} == {("b", "decode")}
    assert heard[0]["versions"] == {"sglang": "0.5.21", "sglang-ppd": "0.1.0"}
    assert heard[0]["load"] == {key: STATE[key] for key in WorkerLoad.__struct_fields__}


async def test_a_scheduler_that_answers_after_a_long_forward_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeat, "_READY_TIMEOUT_S", 0.2)
    announced = asyncio.Event()

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    async def info(_: web.Request) -> web.Response:
        await asyncio.sleep(0.4)  # the forward
        return web.json_response(INFO)

    async def router(_: web.Request) -> web.Response:
        announced.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/ready", ready)
    app.router.add_get("/server_info", info)
    app.router.add_post("/workers", router)
    async with TestServer(app) as server:
        assert server.port is not None
        routers = (str(server.make_url("")).rstrip("/"),)
        beats = Heartbeat(Address("127.0.0.1", server.port), routers, None, None)
        beats.start()
        await announced.wait()
        beats.leave()


async def test_a_router_that_does_not_answer_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    held, enough, goodbye = asyncio.Event(), asyncio.Event(), asyncio.Event()
    heard: dict[str, list[bool]] = {"slow": [], "quick": []}

    async def router(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        heard[name].append((await request.json())["leaving"])
        if name == "slow":
            await held.wait()
        elif len(heard[name]) == 5:
            enough.set()
        if heard[name][-1]:
            goodbye.set()
        return web.Response()

    async def info(_: web.Request) -> web.Response:
        return web.json_response(INFO)

    app = web.Application()
    app.router.add_get("/ready", info)
    app.router.add_get("/server_info", info)
    app.router.add_post("/{name}/workers", router)
    async with TestServer(app) as server:
        assert server.port is not None
        urls = tuple(str(server.make_url(f"/{name}")) for name in heard)
        beats = Heartbeat(Address("127.0.0.1", server.port), urls, None, None)
        beats.start()
        await enough.wait()
        assert heard["slow"] == [False], "no second one before the first is answered"
        beats.leave()
        await goodbye.wait()
        assert heard["quick"][-1], "the quick one has the sign-off, the slow one has not"
        assert heard["slow"] == [False]
        goodbye.clear()
        held.set()
        await goodbye.wait()
        assert heard["slow"] == [False, True]


def test_an_announcement_has_the_load_of_each_rank() -> None:
    ranks = [
        WorkerDescription(
            version=1, boot_id="b", local_prefill=True, dp_rank=rank, running=rank + 5
        )
        for rank in (2, 0, 1)
    ]
    about: dict[str, Any] = {"url": "http://w:1", "role": Role.DECODE, "models": ("m",)}
    about |= {"bootstrap_port": 0, "page_size": 1, "sglang_version": "0"}
    sent = announce(ranks, **about)
    assert [load.running for load in sent.loads_of_ranks] == [5, 6, 7]
    assert sent.load.running == 5, "for routers that know of one load"
    assert announce(ranks[:1], **about).loads == ()
