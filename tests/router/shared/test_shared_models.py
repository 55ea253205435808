"""Routers of several models share the turns of each."""

from __future__ import annotations

from eval.fake_worker.worker import FakeWorker
from eval.store_server import StoreServer
from router.config.models import ModelOptions

from ..conftest import Client, Cluster
from ..fixtures import CHAT, chat, serving, until
from ..scripts import answering
from .conftest import shared
from .test_sharing import replicas

RED, BLUE = "red", "blue"


def engines(model: str) -> list[FakeWorker]:
    decode = FakeWorker("decode", model=model, script=answering(cached=96))
    return [FakeWorker("prefill", model=model, script=answering()), decode]


async def continues(router: Client, model: str) -> None:
    body = {**chat("hello", "www", "and"), "model": model}

    async def holds() -> bool:
        shown = await router.post(f"/explain{CHAT}", body)
        return shown.json["features"] is not None

    await until(holds)


async def test_each_model_has_its_own_turns(cluster: Cluster, server: StoreServer) -> None:
    workers = [*engines(RED), *engines(BLUE)]
    both = {RED: ModelOptions(), BLUE: ModelOptions()}
    async with replicas(cluster, workers, 2, models=both, shared=shared(server)) as (one, other):
        for model in both:
            await one.chat("hello", model=model)
        for model in both:
            await continues(other, model)
            reply = await other.chat("hello", "www", "and", model=model)
            assert reply.route == ("local", "policy_full")
            assert await other.metric("ppd_known_turns", model=model) == 2


async def test_a_router_skips_turns_of_models_that_it_does_not_serve(
    cluster: Cluster, server: StoreServer
) -> None:
    """The name of its only model is that of its workers, which is the name at the other router."""
    red, blue = engines(RED), engines(BLUE)
    both = {RED: ModelOptions(), BLUE: ModelOptions()}
    async with (
        serving(*red, *blue),
        replicas(cluster, [*red, *blue], 1, models=both, shared=shared(server)) as (one,),
        replicas(cluster, red, 1, shared=shared(server)) as (other,),
    ):
        await one.chat("hello", model=BLUE)
        await one.chat("hello", model=RED)
        await continues(other, RED)
        assert await other.metric("ppd_known_turns") == 1
        received = "ppd_shared_records_received_total"
        assert await other.metric(received, result="unserved") == 1
        assert await other.metric(received, result="merged") == 1
