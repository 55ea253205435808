"""What operators see of several models, and that a router of one model shows none of it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from eval.replay_decisions import Changes, run_replay
from ppd.errors import ConfigError
from router.config.gateway import GatewayConfig
from router.config.limits import AdmissionLimits
from router.config.models import ModelOptions
from router.config.options import RouterConfig
from router.server.run import running
from router.server.supervisor import share_of

from ..conftest import Client, Cluster
from ..fixtures import CHAT, LATER, always_remote, chat, local_unless_long, until, write_table
from ..gateway.envoy import gateway, request_head
from ..gateway.test_picker import picker_port
from .conftest import BOTH, NAMES, Pair, TwoModels, worker


async def get(client: Client, path: str) -> Any:
    async with client.http.get(client.url + path) as response:
        return await response.json()


async def converse(pair: Pair, **fields: Any) -> None:
    """Two turns of each model."""
    for name in NAMES:
        await pair.client.chat("hello", model=name, **fields)
        await pair.client.chat(*LATER, model=name, **fields)


async def test_metrics_have_the_model_as_a_label(two_models: TwoModels) -> None:
    async with two_models() as pair:
        await converse(pair)
        await pair.client.chat("hello", model="green")
        client = pair.client
        for name in NAMES:
            answered = {"endpoint": CHAT, "outcome": "ok", "model": name}
            assert await client.metric("ppd_finished_total", **answered) == 2
            assert await client.metric("ppd_known_turns", model=name) == 2
            alive = {"role": "decode", "worker": pair.decode[name].url, "model": name}
            assert await client.metric("ppd_worker_alive", **alive) == 1
            assert await client.metric("ppd_decision_seconds_count", model=name) == 2
        rejected = {"endpoint": CHAT, "outcome": "rejected"}
        assert await client.metric("ppd_finished_total", **rejected) == 1
        async with client.http.get(f"{client.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        assert len(lines) == len(set(lines)), "no family and no series comes twice"
        bare = [one for one in lines if one.startswith("ppd_qps")]
        assert sorted(one.split(" ")[0] for one in bare) == [
            'ppd_qps{model="blue"}',
            'ppd_qps{model="red"}',
        ]


async def test_operators_see_the_model_of_workers_and_decisions(two_models: TwoModels) -> None:
    async with two_models() as pair:
        await converse(pair)
        workers = await pair.client.workers()
        health = (await get(pair.client, "/health"))["workers"]
        decisions = (await get(pair.client, "/explain"))["decisions"]
        state = await get(pair.client, "/dashboard/state")
        for name in NAMES:
            assert workers[pair.decode[name].url]["model"] == name
            reply = await pair.client.post(f"/explain{CHAT}", chat(*LATER, model=name))
            assert (reply.json["model"], reply.json["decision"]["route"]) == (name, "local")
        assert {one["model"] for one in health} == set(NAMES)
        assert [one["decided"]["model"] for one in decisions] == ["blue", "blue", "red", "red"]
        assert {one["model"] for one in state["workers"]} == set(NAMES)
        assert state["models"] == list(NAMES)
        assert state["known_turns"] == 4
        assert [(one["name"], one["known_turns"]) for one in state["served"]] == [
            ("red", 2),
            ("blue", 2),
        ]


@pytest.mark.parametrize("models", [{}, {"red": ModelOptions()}])
async def test_a_router_of_one_model_names_it_nowhere(
    cluster: Cluster, models: dict[str, ModelOptions]
) -> None:
    async with cluster(worker("prefill", "red"), worker("decode", "red"), models=models) as client:
        await client.chat("hello", model="red")
        shown = [
            *(await client.workers()).values(),
            *(await get(client, "/health"))["workers"],
            (await get(client, "/explain"))["decisions"][0]["decided"],
            (await client.post(f"/explain{CHAT}", chat("hello", model="red"))).json,
        ]
        assert not any("model" in one for one in shown)
        assert (await get(client, "/dashboard/state"))["served"] == []
        answered = {"endpoint": CHAT, "outcome": "ok"}
        assert await client.metric("ppd_finished_total", **answered) == 1
        assert (await get(client, "/table"))["policy"] == "full"


async def test_health_needs_one_complete_model(two_models: TwoModels) -> None:
    async with two_models() as pair:

        async def status() -> int:
            async with pair.client.http.get(f"{pair.client.url}/health") as response:
                return response.status

        async def degraded() -> bool:
            return await status() == 503

        async def red_is_down() -> bool:
            return not (await pair.client.workers())[pair.decode["red"].url]["alive"]

        await pair.decode["red"].close()
        await until(red_is_down)
        assert await status() == 200, "blue is served"
        missing = (await get(pair.client, "/dashboard/state"))["served"]
        assert [one["missing"] for one in missing] == [["decode"], []]
        await pair.decode["blue"].close()
        await until(degraded)


async def test_tables_and_decisions_of_operators_name_the_model(
    two_models: TwoModels, tmp_path: Path
) -> None:
    tables = {
        "red": write_table(tmp_path / "red.json", local_unless_long, model="red"),
        "blue": write_table(tmp_path / "blue.json", always_remote, model="blue"),
    }
    models = {name: ModelOptions(table=str(path)) for name, path in tables.items()}
    log = tmp_path / "decisions.jsonl"
    options: dict[str, Any] = {"models": models, "policy": "ppd", "decision_log": str(log)}
    async with two_models(**options, corrections=frozenset({"shrinkage"})) as pair:
        client = pair.client
        for name in NAMES:
            assert (await get(client, f"/table?model={name}"))["model"] == name
        sizes = {"turn": {"context_tokens": 100, "new_tokens": 9, "output_tokens": 9}}
        routes = {}
        for name in NAMES:
            reply = await client.post("/decide", {**sizes, "model": name})
            routes[name] = reply.json["decision"]["route"]
        assert routes == {"red": "local", "blue": "remote"}
        for path, body in (("/table", None), ("/decide", sizes)):
            if body is None:
                reply_json = await get(client, path)
            else:
                reply_json = (await client.post(path, body)).json
            assert "must name one of red, blue" in reply_json["error"]["message"]
        unknown = await client.post("/decide", {**sizes, "model": "green"})
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        await converse(pair, stream=True)
        assert (await client.post("/table/reset?model=blue", {})).json == {"forgotten": 1}
        assert (await client.post("/table/reset", {})).json == {"forgotten": 1}
    kept = Changes(tables["red"], None, None, None, model="red")
    assert run_replay(log, kept, 0) == 0
    with pytest.raises(ConfigError, match="the log is of red, blue: name one by --model"):
        run_replay(log, replace(kept, model=""), 0)


async def test_a_log_of_several_models_is_replayed_for_one(
    two_models: TwoModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    async with two_models(decision_log=str(log)) as pair:
        await converse(pair)
        await pair.client.chat("other", model="blue")
    for name, decisions in (("red", 2), ("blue", 3)):
        run_replay(log, Changes(None, None, None, None, model=name), 5)
        summary = orjson.loads(capsys.readouterr().out.splitlines()[-1])
        assert (summary["decisions"], summary["identical"]) == (decisions, decisions)


@asynccontextmanager
async def reloadable(config: RouterConfig, later: list[RouterConfig]) -> AsyncIterator[Client]:
    """A router that reads the next of ``later`` at each SIGHUP."""
    configs = iter(later)
    async with (
        running(config, read=lambda: next(configs)) as url,
        aiohttp.ClientSession() as http,
    ):
        yield Client(url, http)


async def test_tables_and_limits_of_models_are_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ppd.router")
    table = write_table(tmp_path / "red.json", local_unless_long, model="red")
    red = (worker("prefill", "red"), worker("decode", "red"))
    blue = (worker("prefill", "blue"), worker("decode", "blue"))
    for one in (*red, *blue):
        await one.listen()
    config = RouterConfig(
        prefill=(red[0].url, blue[0].url),
        decode=(red[1].url, blue[1].url),
        port=0,
        models=BOTH,
    )
    limited = ModelOptions(
        table=str(table), admission=AdmissionLimits(max_in_flight=1, max_waiting=0)
    )
    new = msgspec.structs.replace(config, models={**BOTH, "red": limited})
    other = msgspec.structs.replace(config, models={**BOTH, "green": ModelOptions()})

    async def reload(client: Client, line: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

        async def logged() -> bool:
            await client.workers()
            return line in caplog.text

        await until(logged)

    async with reloadable(config, [new, other]) as client:
        assert (await get(client, "/table?model=red"))["path"] is None
        await reload(client, "configuration reloaded: models")
        assert (await get(client, "/table?model=red"))["path"] == str(table)
        assert (await get(client, "/table?model=blue"))["path"] is None
        await reload(client, "not reloaded: models: other models")
        assert (await client.chat("hello", model="red")).status == 200
    for one in (*red, *blue):
        await one.close()


def test_each_process_has_its_share_of_a_models_limits() -> None:
    limits = AdmissionLimits(max_in_flight=8, max_waiting=6)
    config = RouterConfig(
        prefill=("http://p:1",),
        decode=("http://d:1",),
        processes=4,
        admin_port=9000,
        models={"red": ModelOptions(admission=limits), "blue": ModelOptions()},
    )
    own = share_of(config, 1, 4, 9000)
    assert own.admission_of("red") == AdmissionLimits(max_in_flight=2, max_waiting=2)
    assert own.admission_of("blue") == own.admission


async def test_a_gateway_gets_workers_of_the_named_model(
    two_models: TwoModels, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ppd.router")
    async with (
        two_models(gateway=GatewayConfig(port=0)) as pair,
        gateway(picker_port(caplog)) as envoy,
    ):
        for name in NAMES:
            seen = await envoy.post(CHAT, chat("hello", model=name))
            assert seen.destination == f"127.0.0.1:{pair.decode[name].port}"
        refused = await envoy.post(CHAT, chat("hello", model="green"))
        assert (refused.status, refused.immediate) == (404, True)
        call = envoy.call()
        await call.send(**request_head({":method": "GET", ":path": "/v1/models"}, None, end=True))
        answer = (await call.read()).immediate_response
        call.give_up()
        assert answer is not None
        assert [one["id"] for one in orjson.loads(answer.body)["data"]] == list(NAMES)
