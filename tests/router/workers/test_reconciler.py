"""What sources list and what the pool holds are brought together, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from ppd.announcement import Announcement
from ppd.contract import Role
from router.workers.discovery import Reconciler
from router.workers.handshake import connect_worker
from router.workers.membership import Membership
from router.workers.registry import WorkerRegistry

from ..scene import serving, workers

D = "http://127.0.0.1:2"


@asynccontextmanager
async def reconciling() -> AsyncIterator[tuple[WorkerRegistry, Reconciler]]:
    async with aiohttp.ClientSession() as control:
        pool = WorkerRegistry(control)
        yield pool, Reconciler(pool, 1.0)


async def settle(reconciler: Reconciler) -> None:
    await asyncio.gather(*reconciler.reconcile())


async def test_why_one_does_not_join_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    p, d = workers()
    async with serving(p, d), reconciling() as (pool, reconciler):
        reconciler.want("file", {p.url: Role.DECODE, D: Role.DECODE})
        await settle(reconciler)
        await settle(reconciler)
        assert pool.workers == []
        assert caplog.text.count("worker cannot join yet") == 2
        assert "was given as a decode worker, but runs with --disaggregation-mode prefill" in (
            caplog.text
        )
        p.role = "decode"
        await settle(reconciler)
        assert [worker.url for worker in pool.workers] == [p.url]


async def test_one_whose_role_has_changed_leaves_and_joins_anew() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (pool, reconciler):
        reconciler.want("file", {d.url: Role.DECODE})
        await settle(reconciler)
        d.role = "prefill"
        reconciler.want("file", {d.url: Role.PREFILL})
        await settle(reconciler)
        assert [worker.role for worker in pool.workers] == [Role.PREFILL]


async def test_what_two_sources_list_leaves_when_neither_does() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (pool, reconciler):
        reconciler.want("file", {d.url: Role.DECODE})
        reconciler.want("pods", {d.url: Role.DECODE})
        await settle(reconciler)
        reconciler.want("file", {})
        await settle(reconciler)
        assert (len(pool.workers), pool.workers[0].draining) == (1, False)
        reconciler.want("pods", {})
        await settle(reconciler)
        assert pool.workers == []


async def test_what_changes_while_hands_are_shaken_counts() -> None:
    p, d = workers()
    async with serving(p, d), reconciling() as (pool, reconciler):
        reconciler.want("file", {p.url: Role.PREFILL, d.url: Role.DECODE})
        greetings = reconciler.reconcile()
        assert reconciler.reconcile() == [], "one greeting at a time"
        reconciler.want("file", {d.url: Role.DECODE})
        pool.join(await connect_worker(pool.control, Role.DECODE, d.url))  # announced, or added
        await asyncio.gather(*greetings)
        assert [worker.url for worker in pool.workers] == [d.url]
        reconciler.want("file", {})
        await settle(reconciler)
        assert [worker.url for worker in pool.workers] == [d.url], "it did not come this way"


async def test_one_that_is_listed_and_announces_itself_joins_once() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (pool, reconciler):
        members = Membership(pool, roles=(Role.DECODE,), token="", budget_s=10.0, clock=lambda: 0.0)
        said = Announcement(url=d.url, role=Role.DECODE, boot_id=d.boot_id)
        reconciler.want("file", {d.url: Role.DECODE})
        await asyncio.gather(members.hear(said), *reconciler.reconcile())
        assert [worker.url for worker in pool.workers] == [d.url]


async def test_one_process_joins_once_under_whatever_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, d = workers()
    async with serving(d), reconciling() as (pool, reconciler):
        alias = d.url.replace("127.0.0.1", "localhost")
        reconciler.want("file", {d.url: Role.DECODE, alias: Role.DECODE})
        await settle(reconciler)
        assert len(pool.workers) == 1
        assert "is the process that is known as" in caplog.text


async def test_another_process_at_an_address_that_comes_back_holds_nothing() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (pool, reconciler):
        reconciler.want("file", {d.url: Role.DECODE})
        await settle(reconciler)
        (worker,) = pool.workers
        before, worker.in_flight = worker.identity, 1
        reconciler.want("file", {})
        await settle(reconciler)
        assert (worker.draining, pool.workers) == (True, [worker])
        d.boot_id = "another"
        reconciler.want("file", {d.url: Role.DECODE})
        await settle(reconciler)
        assert worker.ready
        assert worker.identity != before
