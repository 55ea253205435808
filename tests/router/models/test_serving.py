"""Each request goes to the workers of the model that it names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from ppd.errors import ConfigError, WorkerError
from router.apis.passthrough import CLASSIFY, COUNT_TOKENS, EMBEDDINGS, RERANK, SCORE
from router.config.limits import AdmissionLimits
from router.config.models import ModelOptions
from router.config.options import RouterConfig

from ..conftest import Client, Cluster
from ..fixtures import CHAT, LATER, chat, local_unless_long, until, write_table
from ..scripts import gated, hanging
from .conftest import BOTH, NAMES, TwoModels, worker

CHAT_FIELDS = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {**CHAT_FIELDS, "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CHAT_FIELDS,
    "/v1/completions": {"prompt": "a b c"},
    "/generate": {"text": "a b c"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": MESSAGE,
}


async def test_turns_stay_with_the_workers_of_their_model(two_models: TwoModels) -> None:
    async with two_models() as pair:
        for name in NAMES:
            first = await pair.client.chat("hello", model=name)
            assert first.route == ("remote", "first_turn")
            later = await pair.client.chat(*LATER, model=name)
            assert later.route == ("local", "policy_full"), "its conversation is its own"
        for name in NAMES:
            assert [body["model"] for body in pair.prefill[name].bodies] == [name]
            assert [body["model"] for body in pair.decode[name].bodies] == [name] * 2


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_reaches_the_named_model(two_models: TwoModels, path: str) -> None:
    async with two_models() as pair:
        for name in NAMES:
            reply = await pair.client.post(path, {**BODIES[path], "model": name})
            assert reply.status == 200
            assert len(pair.decode[name].legs) == 1


@pytest.mark.parametrize("path", [*BODIES, COUNT_TOKENS])
async def test_an_unknown_model_is_not_found_in_the_form_of_the_api(
    two_models: TwoModels, path: str
) -> None:
    body = {**BODIES.get(path, MESSAGE), "model": "green"}
    async with two_models() as pair:
        reply = await pair.client.post(path, body)
        assert reply.status == 404
        error = reply.json["error"]
        assert error["message"] == "the model 'green' does not exist; available: red, blue"
        if path in ("/v1/messages", COUNT_TOKENS):
            assert (reply.json["type"], error["type"]) == ("error", "not_found_error")
        else:
            assert error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": "default"}])
async def test_a_request_without_a_model_is_refused_with_the_choice(
    two_models: TwoModels, cluster: Cluster, fields: dict[str, Any]
) -> None:
    async with two_models() as pair:
        for path in (CHAT, "/v1/tokenize"):
            reply = await pair.client.post(path, {**CHAT_FIELDS, **fields})
            assert (reply.status, reply.json["error"]["param"]) == (400, "model")
            assert "must name one of red, blue" in reply.json["error"]["message"]
    for models in ({}, {"red": ModelOptions()}):
        one = (worker("prefill", "red"), worker("decode", "red"))
        async with cluster(*one, models=models) as client:
            assert (await client.post(CHAT, {**CHAT_FIELDS, **fields})).status == 200


async def test_adapters_belong_to_their_model(two_models: TwoModels) -> None:
    adapters = {"red": ("sql", "both"), "blue": ("both",)}
    async with two_models(adapters=adapters) as pair:
        for named, served_by in (
            ("sql", "red"),
            ("red:sql", "red"),
            ("blue:both", "blue"),
            ("blue:later", "blue"),
        ):
            before = len(pair.decode[served_by].legs)
            assert (await pair.client.chat(named, model=named)).status == 200
            assert len(pair.decode[served_by].legs) == before + 1
        reply = await pair.client.chat("hello", model="both")
        assert reply.status == 400
        assert "name red:both or blue:both" in reply.json["error"]["message"]
        reply = await pair.client.chat("hello", model="green:sql")
        assert "available: red, both, sql, blue, both" in reply.json["error"]["message"]
        async with pair.client.http.get(f"{pair.client.url}/v1/models") as response:
            listed = [card["id"] for card in (await response.json())["data"]]
        assert listed == ["red", "both", "sql", "blue", "both"]


@pytest.mark.parametrize("path", BODIES)
async def test_sglang_gets_an_adapter_by_the_form_that_it_reads(
    two_models: TwoModels, path: str
) -> None:
    async with two_models(adapters={"red": ("sql",)}) as pair:
        for named in ("sql", "red:sql"):
            assert (await pair.client.post(path, {**BODIES[path], "model": named})).status == 200
        given = ["sql", "red:sql"] if path == "/generate" else ["red:sql"] * 2
        assert [body["model"] for body in pair.decode["red"].bodies] == given


async def test_both_names_of_an_adapter_continue_one_conversation(two_models: TwoModels) -> None:
    async with two_models(adapters={"red": ("sql",)}) as pair:
        await pair.client.chat("hello", model="sql")
        assert (await pair.client.chat(*LATER, model="red:sql")).route[0] == "local"


async def test_workers_of_a_model_list_their_adapters_in_any_order(cluster: Cluster) -> None:
    """SGLang lists them by their last use, and workers may have loaded others."""
    prefill = worker("prefill", "red", adapters=("a", "b"))
    decode = worker("decode", "red", adapters=("b", "a"))
    async with cluster(prefill, decode) as client:
        assert (await client.chat("hello", model="a")).status == 200
        decode.vanish()
        await until(lambda: _alive(client, decode.url, False))
        decode.adapters = ("c", "b")
        await decode.restart()
        await until(lambda: _alive(client, decode.url, True))
        async with client.http.get(f"{client.url}/v1/models") as response:
            listed = [card["id"] for card in (await response.json())["data"]]
        assert listed == ["red", "a", "b", "c"]


async def test_requests_for_encoders(two_models: TwoModels) -> None:
    async def rank(request: Request) -> None:
        request.answer([{"score": 0.5, "index": 0}])

    ranker = FakeWorker("null", rank, model="ranker")
    async with ranker.serving():
        options = {**BOTH, "ranker": ModelOptions(embedding=(ranker.url,))}
        async with two_models(models=options) as pair:
            for i, path in enumerate((EMBEDDINGS, RERANK, SCORE, CLASSIFY), 1):
                body = {"model": "ranker", "query": "q", "documents": ["d"], "rid": "x"}
                reply = await pair.client.post(path, body)
                assert reply.json == [{"score": 0.5, "index": 0}]
                assert ranker.legs[-1].path == path
                assert ranker.bodies[-1]["rid"] == "anonymous/x/", "tenants abort by prefix"
                assert (await pair.client.post(path, {"model": "blue", "text": "x"})).status == 200
                assert len(pair.decode["blue"].legs) == i
                reply = await pair.client.post(path, {"model": "green"})
                assert (reply.status, len(pair.decode["red"].legs)) == (404, 0)
                assert "available: red, blue, ranker" in reply.json["error"]["message"]
            reply = await pair.client.chat("hello", model="ranker")
            assert (reply.status, "available: red, blue" in str(reply.json)) == (404, True)
            async with pair.client.http.get(f"{pair.client.url}/v1/models/ranker") as response:
                assert (await response.json())["id"] == "ranker"


async def test_requests_to_the_tokenizer_are_the_models(two_models: TwoModels) -> None:
    async with two_models() as pair:
        for path in ("/v1/tokenize", "/v1/detokenize", COUNT_TOKENS):
            assert (await pair.client.post(path, {"model": "blue"})).status == 200
        assert (len(pair.decode["red"].legs), len(pair.decode["blue"].legs)) == (0, 3)


async def test_requests_to_the_tokenizer_reach_a_server_of_several_ranks(cluster: Cluster) -> None:
    decode = worker("decode", "red")
    decode.dp_size = 2
    async with cluster(worker("prefill", "red"), decode) as client:
        assert (await client.post("/v1/tokenize", {"model": "red"})).status == 200
        assert len(decode.legs) == 1


async def test_one_models_limits_hold_up_no_other(two_models: TwoModels) -> None:
    gate = asyncio.Event()
    models = {
        "red": ModelOptions(admission=AdmissionLimits(max_in_flight=1, max_waiting=0)),
        "blue": ModelOptions(),
    }
    async with two_models(models=models, scripts={"red": gated(gate)}) as pair:
        red = pair.decode["red"]
        held = asyncio.create_task(pair.client.chat("hello", model="red", stream=True))
        await red.arrived.wait()
        refused = await pair.client.chat("other", model="red")
        assert refused.status == 429
        assert (await pair.client.chat("hello", model="blue")).status == 200
        gate.set()
        assert (await held).status == 200


async def test_each_model_has_its_own_kv(two_models: TwoModels) -> None:
    """A full decode worker of one model holds up no request of the other."""
    limits = AdmissionLimits(max_wait_s=0.2)
    async with two_models(admission=limits, scripts={"red": hanging}) as pair:
        red = pair.decode["red"]
        red.free_tokens = 10
        await red.load_is_known()
        held = asyncio.create_task(pair.client.chat("hello", model="red"))
        await red.arrived.wait()
        assert (await pair.client.chat("hello " * 99, model="red")).status == 429
        assert (await pair.client.chat("hello " * 99, model="blue")).status == 200
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_each_model_has_its_own_table(two_models: TwoModels, tmp_path: Path) -> None:
    table = write_table(tmp_path / "red.json", local_unless_long, model="red")
    models = {"red": ModelOptions(table=str(table)), "blue": ModelOptions()}
    async with two_models(models=models, policy="ppd") as pair:
        for name in NAMES:
            await pair.client.chat("hello", model=name)
        assert (await pair.client.chat(*LATER, model="red")).route == ("local", "table")
        assert (await pair.client.chat(*LATER, model="blue")).route[1] == "unknown_cell"


async def test_a_model_whose_workers_come_later(cluster: Cluster) -> None:
    """The router serves as soon as one model is complete."""
    red = (worker("prefill", "red"), worker("decode", "red"))
    blue = (worker("prefill", "blue"), worker("decode", "blue"))
    async with cluster(*red, models=BOTH, accept_workers=True) as client:
        assert (await client.chat("hello", model="red")).status == 200
        reply = await client.chat("hello", model="blue")
        assert (reply.status, reply.json["error"]["type"]) == (503, "worker_error")
        assert "no prefill worker" in reply.json["error"]["message"]
        for one in blue:
            await one.listen()
            body = {"url": one.url, "role": one.role}
            async with client.http.put(f"{client.url}/workers", json=body) as added:
                assert added.status == 200
        assert (await client.chat("hello", model="blue")).status == 200
        assert (await client.post("/explain" + CHAT, chat("x", model="blue"))).status == 200
        for one in blue:
            await one.close()


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ((("decode", "green", ()),), "serves green, and this router serves red, blue"),
        ((), "no prefill and no decode worker serves blue"),
    ],
)
async def test_workers_that_do_not_fit_are_refused(
    cluster: Cluster, others: tuple[tuple[str, str, tuple[str, ...]], ...], problem: str
) -> None:
    red = (worker("prefill", "red"), worker("decode", "red"))
    more = [worker(role, model, adapters=adapters) for role, model, adapters in others]
    with pytest.raises(WorkerError, match=problem):
        async with cluster(*red, *more, models=BOTH):
            pass


async def test_a_worker_that_returns_with_another_model_stays_down(
    two_models: TwoModels, caplog: pytest.LogCaptureFixture
) -> None:
    async def is_logged() -> bool:
        await asyncio.sleep(0)
        return "serves blue now" in caplog.text

    async with two_models() as pair:
        red = pair.decode["red"]
        await red.close()
        await until(lambda: _alive(pair.client, red.url, False))
        red.model = "blue"
        await red.restart()
        await until(is_logged)
        assert (await pair.client.chat("hello", model="red")).status == 503
        red.model = "red"
        await until(lambda: _alive(pair.client, red.url, True))
        assert (await pair.client.chat("hello", model="red")).status == 200


async def _alive(client: Client, url: str, expected: bool) -> bool:
    return (await client.workers())[url]["alive"] is expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"models": BOTH, "table": "t.json", "policy": "ppd"}, "table is of one model"),
        ({"models": BOTH, "embedding": ("http://e:1",)}, "embedding is of one model"),
        ({"models": {"default": ModelOptions()}}, "no model may have the name 'default'"),
        (
            {"models": {"red": ModelOptions(admission=AdmissionLimits(max_waiting=-1))}},
            "models.red.admission.max_waiting must be 0 or more",
        ),
        ({"models": {"red": ModelOptions(embedding=("e:1",))}}, "--embedding must be http"),
        (
            {"models": {"red": ModelOptions(embedding=("http://e:1",), table="t")}},
            "models.red: a model with embedding workers has no table",
        ),
    ],
)
def test_options_of_models_are_checked(options: dict[str, Any], problem: str) -> None:
    urls = {"prefill": ("http://p:1",), "decode": ("http://d:1",), "policy": "full"}
    with pytest.raises(ConfigError, match=problem):
        RouterConfig(**{**urls, **options}).check()
