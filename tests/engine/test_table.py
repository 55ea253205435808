"""Routes by table, and replicas, on real workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ppd.errors import TableError
from ppd.journal import Decided, Finished, Opened, read, replay
from ppd.table import Table
from ppd.table_policy import TablePolicy
from router.config.options import RouterConfig
from router.server.run import running
from tests.unit.fixtures import CostsOf, table_record

from .conversation import Conversation, Turn, user_messages
from .workers import Workers


def cheap_local(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    """Costs of a cell where the local route is better."""
    return 100.0, 10.0, 50.0, 11.0


def cheap_remote(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    """Costs of a cell where the remote route is better."""
    return 100.0, 10.0, 400.0, 20.0


def write_table(path: Path, costs: CostsOf, model: str) -> Path:
    """Write a decision table of a model with the same costs in all cells."""
    path.write_bytes(msgspec.json.encode(table_record(costs, model=model)))
    return path


@asynccontextmanager
async def routed(workers: Workers, **options: Any) -> AsyncIterator[str]:
    """Run a router with these options in front of the workers; gives its URL."""
    config = RouterConfig(
        prefill=(workers.prefill.url,), decode=(workers.decode.url,), port=0, **options
    )
    async with running(config) as url:
        yield url


async def converse(http: aiohttp.ClientSession, url: str, seed: int) -> list[Turn]:
    """Hold a conversation of four turns on a URL."""
    return await Conversation(http, url).send_all(user_messages(seed, 4))


async def test_a_restart_with_another_table_changes_routes_not_answers(
    workers: Workers, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await workers.settle(http)
    ids = []
    for costs, route in ((cheap_local, "local"), (cheap_remote, "remote")):
        path = write_table(tmp_path / f"{route}.json", costs, workers.model.name)
        log = tmp_path / f"{route}.jsonl"
        async with routed(workers, table=str(path), decision_log=str(log)) as url:
            turns = await converse(http, url, 50)
        assert [(t.route, t.reason) for t in turns[1:]] == [(route, "table")] * 3
        ids.append([t.ids for t in turns])
        events = list(read(log.read_bytes().splitlines(keepends=True)))
        assert [type(event) for event in events] == [Opened, *([Decided, Finished] * 4)]

        table = Table.parse(path.read_bytes())
        replayed = list(replay(events, partial(_policy, table)))
        assert [one.now for one in replayed] == [one.was.decision for one in replayed]
    assert ids[0] == ids[1]
    await workers.settle(http)


def _policy(table: Table, opened: Opened) -> TablePolicy:
    return TablePolicy(table, frozenset(opened.corrections), opened.append_budget_tokens)


async def test_a_table_of_another_model_is_refused(workers: Workers, tmp_path: Path) -> None:
    path = write_table(tmp_path / "other.json", cheap_local, "Llama-3.1-8B")
    named = rf"other\.json: .*with Llama-3.1-8B, the workers serve .*{workers.model.name}"
    with pytest.raises(TableError, match=named):
        async with routed(workers, table=str(path)):
            pass


async def test_headroom_is_the_report_less_what_was_sent_since(
    workers: Workers, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """``/v1/loads`` is polled: a turn longer than the whole KV is not sent there."""
    await workers.settle(http)
    path = write_table(tmp_path / "table.json", cheap_local, workers.model.name)
    async with routed(workers, table=str(path), probe_interval_s=0.05) as url:
        conversation = Conversation(http, url)
        await conversation.send("a" * 600)
        body = {
            "messages": [*conversation.messages, {"role": "user", "content": "b"}],
            "max_tokens": 10**6,
        }
        explanation: dict[str, Any] = {"features": {"home_free_tokens": None}}
        while explanation["features"]["home_free_tokens"] is None:  # until the first poll
            async with http.post(f"{url}/explain/v1/chat/completions", json=body) as response:
                explanation = await response.json()
        assert 60_000 < explanation["features"]["home_free_tokens"] <= 65_536
    await workers.settle(http)


async def test_replicas_answer_as_they_do_alone(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    config = RouterConfig(replica=(workers.monolithic.url,), policy="replica", port=0)
    async with running(config) as url:
        routed_turns = await converse(http, url, 51)
    assert [(t.route, t.reason) for t in routed_turns] == [
        ("replica", "first_turn"),
        *([("replica", "policy_replica")] * 3),
    ]
    await workers.settle(http)
    expected = await converse(http, workers.monolithic.url, 51)
    assert [t.ids for t in routed_turns] == [t.ids for t in expected]
    await workers.settle(http)


async def test_a_hybrid_answers_alike_on_both_sides(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    replica = (workers.monolithic.url,)
    replica_only = RouterConfig(replica=replica, policy="replica", port=0)
    async with running(replica_only) as url:
        expected = [await converse(http, url, seed) for seed in range(60, 66)]
    async with routed(workers, replica=replica, policy="full") as url:
        hybrid = [await converse(http, url, seed) for seed in range(60, 66)]
    assert [[t.ids for t in turns] for turns in hybrid] == [
        [t.ids for t in turns] for turns in expected
    ]
    later_routes = {"remote": ("local", "policy_full"), "replica": ("replica", "home_replica")}
    for first, *later in hybrid:
        assert {(t.route, t.reason) for t in later} == {later_routes[first.route]}
    assert {turns[0].route for turns in hybrid} == set(later_routes)
    await workers.settle(http)
