"""Which workers new conversations get, by the option ``placement``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eval.fake_worker.prefixes import PrefixScript, Rooms, prefix_worker
from eval.fake_worker.worker import FakeWorker
from ppd.choice import PlacementRule
from ppd.contract import Role
from ppd.errors import ConfigError
from router.config.file import read_config
from tests.waiting import HANG_S

from ..conftest import Client, Cluster
from ..scripts import hanging

SYSTEM = "All answers follow these rules. " * 1024  # about 8k tokens


def workers(prefill: int = 4, decode: int = 4) -> list[FakeWorker]:
    """Workers with prefix caches; a decode worker answers when the KV has come."""
    rooms = Rooms()
    settings = {"ms_per_token": 0.001, "step_ms": 0.0, "capacity_tokens": 100_000}
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return [prefix_worker(role, rooms, **settings) for role in roles]


async def ask(client: Client, question: str, **fields: Any) -> int:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "fake", "messages": messages, "stream": True, **fields}
    return (await client.post("/v1/chat/completions", body)).status


def served(engines: list[FakeWorker], role: str) -> list[int]:
    """How many requests each worker of a role had."""
    return [len(one.legs) for one in engines if one.role == role]


async def test_an_idle_worker_that_holds_the_prefix_gets_the_conversation(
    cluster: Cluster,
) -> None:
    engines = workers()
    async with cluster(*engines) as client:
        for i in range(12):
            assert await ask(client, f"question {i}") == 200
    assert sorted(served(engines, "prefill")) == [0, 0, 0, 12]
    assert sorted(served(engines, "decode")) == [0, 0, 0, 12]


async def test_by_hash_conversations_are_spread_whatever_is_held(cluster: Cluster) -> None:
    engines = workers()
    async with cluster(*engines, placement=PlacementRule.HASH) as client:
        for i in range(24):
            assert await ask(client, f"question {i}") == 200
    assert max(served(engines, "prefill")) < 24
    assert max(served(engines, "decode")) < 24


async def test_a_prefix_draws_no_herd(cluster: Cluster) -> None:
    """While nothing is answered, a worker's queue grows, and others compute the prefix, too."""
    engines = [
        *(FakeWorker("prefill", hanging) for _ in range(4)),
        *(FakeWorker("decode", hanging) for _ in range(4)),
    ]
    async with cluster(*engines) as client:
        question = "and at length " * 600  # about 2k tokens
        asked = [asyncio.create_task(ask(client, f"{i} {question}")) for i in range(24)]
        for engine in engines:
            await asyncio.wait_for(engine.arrived.wait(), HANG_S)
        while sum(served(engines, "prefill")) < 24 or sum(served(engines, "decode")) < 24:
            await client.workers()
        assert max(served(engines, "prefill")) <= 9, "it has four requests more than another"
        assert max(served(engines, "decode")) <= 9
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_restarted_worker_holds_nothing(cluster: Cluster) -> None:
    engines = workers(prefill=2, decode=1)
    async with cluster(*engines) as client:
        assert await ask(client, "question") == 200
        first = next(one for one in engines if one.role == "prefill" and one.legs)
        other = next(one for one in engines if one.role == "prefill" and one is not first)
        first.vanish()
        for i in range(4):
            assert await ask(client, f"after its end {i}") == 200
        assert len(other.legs) == 4
        await first.restart()
        while not (await client.workers())[first.url]["alive"]:
            pass  # each look is a round trip
        for i in range(4):
            assert await ask(client, f"after its return {i}") == 200
        assert len(other.legs) == 8, "the prefix is where it was computed last"


async def test_the_prefix_is_computed_once(cluster: Cluster) -> None:
    engines = workers(prefill=3, decode=1)
    async with cluster(*engines) as client:
        for i in range(10):
            assert await ask(client, f"question {i}") == 200
    scripts = [one.script for one in engines if one.role == "prefill"]
    computed = [one.computed_tokens for one in scripts if isinstance(one, PrefixScript)]
    assert sorted(computed)[:2] == [0, 0]
    assert sum(computed) < 8192 + 10 * 200


def test_the_option_names_a_rule(tmp_path: Any) -> None:
    path = tmp_path / "router.toml"
    path.write_text('placement = "least"\n')
    with pytest.raises(ConfigError, match=r"placement: .*'least'"):
        read_config(str(path), {})
    path.write_text('placement = "hash"\nprefill = ["http://p:1"]\ndecode = ["http://d:1"]\n')
    assert read_config(str(path), {}).placement is PlacementRule.HASH
