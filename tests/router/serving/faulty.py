"""Workers that fail as they are told, and what a router says of them."""

from __future__ import annotations

from ..conftest import Client
from ..fake_engine import FakeEngine, Script

REMOTE = {"endpoint": "/v1/chat/completions", "route": "remote", "reason": "first_turn"}


def workers(prefill: Script, decode: Script) -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("prefill", prefill), FakeEngine("decode", decode)


async def in_flight(client: Client, *engines: FakeEngine) -> float:
    return sum(
        [await client.metric("ppd_worker_in_flight", role=e.role, worker=e.url) for e in engines]
    )
