"""Workers that fail as they are told, and what a router says of them."""

from __future__ import annotations

from eval.fake_worker.request import Script
from eval.fake_worker.worker import FakeWorker

from ..conftest import Client

REMOTE = {"endpoint": "/v1/chat/completions", "route": "remote", "reason": "first_turn"}


def workers(prefill: Script, decode: Script) -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("prefill", prefill), FakeWorker("decode", decode)


async def in_flight(client: Client, *engines: FakeWorker) -> float:
    return sum(
        [await client.metric("ppd_worker_in_flight", role=e.role, worker=e.url) for e in engines]
    )
