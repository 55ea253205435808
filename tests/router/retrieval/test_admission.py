"""Admission and rate limits of turns with passages."""

from __future__ import annotations

import asyncio

import pytest

from eval.fake_worker.worker import FakeWorker
from router.config.limits import AdmissionLimits, RateLimit
from router.config.retrieval import RetrievalConfig
from router.retrieval.requests import RetrievalRequest

from ..conftest import Cluster
from ..scripts import answering, gated
from .fake_pool import FakePool

OPTIONS = {"collection": "docs", "k": 1}
LONG = "all about cats " * 400  # some 1,500 tokens


async def test_a_turn_whose_completed_body_is_malformed_releases_its_admission(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RetrievalRequest.with_passages
    monkeypatch.setattr(
        RetrievalRequest, "with_passages", lambda self, text: b"{" if text else plain(self, text)
    )
    workers = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with FakePool(lambda _: [("a", 0.9, "all about cats")]).serving() as pool:
        options = {"admission": AdmissionLimits(max_in_flight=1, max_wait_s=5.0)}
        async with cluster(*workers, retrieval=RetrievalConfig(url=pool.url), **options) as client:
            malformed = await client.chat("about cats", retrieval=OPTIONS)
            assert (malformed.status, "no valid JSON" in malformed.json["error"]["message"]) == (
                400,
                True,
            )
            assert (await client.chat("about cats")).status == 200


@pytest.mark.parametrize(("passage", "status"), [("short", 200), (LONG, 429)])
async def test_passages_are_charged_while_their_turn_is_served(
    cluster: Cluster, passage: str, status: int
) -> None:
    gate = asyncio.Event()
    engines = FakeWorker("prefill", gated(gate)), FakeWorker("decode", gated(gate))
    async with FakePool(lambda _: [("a", 0.9, passage)]).serving() as pool:
        options = {"rate": RateLimit(tokens_per_minute=500)}
        async with cluster(*engines, retrieval=RetrievalConfig(url=pool.url), **options) as client:
            fields = {"stream": True, "max_tokens": 4}
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(client.chat("cats", retrieval=OPTIONS, **fields))
                await engines[1].arrived.wait()
                second = tasks.create_task(client.chat("dogs", **fields))
                if status == 200:
                    engines[1].arrived.clear()
                    await engines[1].arrived.wait()
                else:
                    await asyncio.wait([second])
                gate.set()
            assert (first.result().status, second.result().status) == (200, status)
