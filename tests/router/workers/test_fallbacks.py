"""Each fallback has a gauge, one line of the log, and a mark on the dashboard."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.contract import Role
from router.config.table_files import read_table
from router.config.tables import is_empty
from router.workers.fallbacks import Fallback, Fallbacks
from router.workers.group import ModelWorkers
from router.workers.sglang import Publisher

from ..conftest import Client, Cluster
from ..fixtures import local_unless_long, model_workers, until, workers, write_table
from ..scripts import answering


def active(
    group: ModelWorkers, policy: str = "full", decode_fallback: bool = True
) -> dict[str, int]:
    fallbacks = Fallbacks(group, decode_fallback=decode_fallback, kv_events=True)
    return {name: count for name, count in fallbacks.counts(policy, None).items() if count}


def test_a_complete_cluster_has_none() -> None:
    assert active(model_workers(prefill=1, decode=2)) == {}


def test_without_a_prefill_worker_decode_workers_prefill() -> None:
    group = model_workers(prefill=1, decode=1)
    group.of(Role.PREFILL)[0].server.alive = False
    assert active(group) == {Fallback.DECODE_FALLBACK: 1}
    assert active(group, decode_fallback=False) == {}, "then requests are refused"
    hybrid = model_workers(prefill=1, decode=1, replica=1)
    hybrid.of(Role.PREFILL)[0].server.alive = False
    assert active(hybrid) == {}, "the replica serves all"


def test_plain_workers_are_counted_unless_the_policy_needs_no_plugin() -> None:
    group = model_workers(prefill=1, decode=3)
    for worker in group.of(Role.DECODE)[:2]:
        worker.server.handshake = replace(worker.handshake, local_prefill=False)
    assert active(group) == {Fallback.UNPATCHED: 2}
    assert active(group, "pd", decode_fallback=False) == {}


def test_kv_events_that_do_not_arrive() -> None:
    group = model_workers(prefill=1, decode=2)
    one, two = group.of(Role.DECODE)
    for worker in (one, two):
        worker.server.handshake = replace(worker.handshake, publisher=Publisher(1, "", 1))
    one.publishes, two.publishes = True, False
    assert active(group) == {Fallback.KV_EVENTS_STOPPED: 1}
    one.publishes = None  # the subscription has ended, as with a lower cache tier
    assert active(group) == {Fallback.KV_EVENTS_STOPPED: 2}
    two.server.alive = False
    one.server.handshake = replace(one.handshake, keeps_sessions=True)
    assert active(group) == {}


def test_a_table_without_a_measured_cell_is_as_none(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.json", local_unless_long)
    measured = read_table(path)
    assert not is_empty(measured)
    record = measured.table.record
    raw = msgspec.to_builtins(record)
    for cell in raw["cells"]:
        cell["seeds"] = []
        for route in ("remote", "local"):
            for name in ("ttft_ms", "tpot_ms"):
                cell[route][name]["n"] = 0
    path.write_bytes(msgspec.json.encode(raw))
    assert is_empty(read_table(path))
    assert is_empty(None)
    assert active(model_workers(prefill=1, decode=1), "ppd") == {Fallback.NO_TABLE: 1}


async def fallback_is(client: Client, kind: Fallback, value: float) -> None:
    async def holds() -> bool:
        return await client.metric("ppd_fallback", kind=kind) == value

    await until(holds)


async def test_a_lost_prefill_worker_is_logged_once_and_so_is_its_return(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ppd.router.workers")
    begins, ends = "decode workers prefill whole prompts", "no longer prefill whole prompts"
    p, d = workers()

    async def logged(text: str, count: int) -> None:
        async def holds() -> bool:
            await client.metric("ppd_known_turns")
            return caplog.text.count(text) == count

        await until(holds)

    async with cluster(p, d, decode_fallback=True) as client:
        await fallback_is(client, Fallback.DECODE_FALLBACK, 0)
        for count in (1, 2):
            p.ready = False
            await fallback_is(client, Fallback.DECODE_FALLBACK, 1)
            await logged(begins, count)
            assert (await client.chat(f"hello {count}")).route == ("local", "no_prefill")
            p.ready = True
            await fallback_is(client, Fallback.DECODE_FALLBACK, 0)
            await logged(ends, count)
    assert caplog.text.count(begins) == 2


async def test_a_plain_decode_worker_and_a_missing_table_are_seen_from_the_start(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    p = FakeWorker("prefill", answering())
    d = FakeWorker("decode", answering(), local_prefill=False)
    async with cluster(p, d, policy="ppd") as client:
        await fallback_is(client, Fallback.UNPATCHED, 1)
        await fallback_is(client, Fallback.NO_TABLE, 1)
        await fallback_is(client, Fallback.KV_EVENTS_STOPPED, 0)
    assert caplog.text.count("does not offer local prefill") == 1
    assert caplog.text.count("no decision table for fake") == 1
