"""The reconciler, step by step: the registry follows what sources list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from ppd.announcement import Announcement
from ppd.contract import Role
from router.workers.discovery import Reconciler
from router.workers.handshake import connect_server
from router.workers.membership import Membership
from router.workers.registry import WorkerRegistry

from ..fixtures import serving, workers

D = "http://127.0.0.1:2"


@asynccontextmanager
async def reconciling() -> AsyncIterator[tuple[WorkerRegistry, Reconciler]]:
    async with aiohttp.ClientSession() as control:
        registry = WorkerRegistry(control)
        yield registry, Reconciler(registry, 1.0)


async def settle(reconciler: Reconciler) -> None:
    await asyncio.gather(*reconciler.reconcile())


async def test_why_a_worker_cannot_join_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    p, d = workers()
    async with serving(p, d), reconciling() as (registry, reconciler):
        reconciler.update("file", {p.url: Role.DECODE, D: Role.DECODE})
        await settle(reconciler)
        await settle(reconciler)
        assert registry.workers == []
        assert caplog.text.count("worker cannot join yet") == 2
        assert "was given as a decode worker, but runs with --disaggregation-mode prefill" in (
            caplog.text
        )
        p.role = "decode"
        await settle(reconciler)
        assert [worker.url for worker in registry.workers] == [p.url]


async def test_a_worker_with_another_role_leaves_and_joins_again() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        reconciler.update("file", {d.url: Role.DECODE})
        await settle(reconciler)
        d.role = "prefill"
        reconciler.update("file", {d.url: Role.PREFILL})
        await settle(reconciler)
        assert [worker.role for worker in registry.workers] == [Role.PREFILL]


async def test_a_worker_of_two_sources_leaves_when_neither_lists_it() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        reconciler.update("file", {d.url: Role.DECODE})
        reconciler.update("pods", {d.url: Role.DECODE})
        await settle(reconciler)
        reconciler.update("file", {})
        await settle(reconciler)
        assert (len(registry.workers), registry.servers[0].draining) == (1, False)
        reconciler.update("pods", {})
        await settle(reconciler)
        assert registry.workers == []


async def test_a_drain_holds_if_a_worker_is_not_listed_for_a_while() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        for drained in (False, True):
            reconciler.update("file", {d.url: Role.DECODE})
            await settle(reconciler)
            registry.servers[0].draining = drained
            reconciler.update("file", {})
            await settle(reconciler)
            assert registry.servers == []
            reconciler.update("file", {d.url: Role.DECODE})
            await settle(reconciler)
            assert registry.servers[0].draining is drained


async def test_an_operators_drain_of_a_worker_that_leaves_holds() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        for drained in (True, False):
            reconciler.update("file", {d.url: Role.DECODE})
            await settle(reconciler)
            (worker,) = registry.workers
            worker.in_flight = 1
            reconciler.update("file", {})
            await settle(reconciler)
            worker.server.draining = drained  # what the operators' endpoint sets
            assert worker.draining
            worker.in_flight = 0
            reconciler.update("file", {d.url: Role.DECODE})
            await settle(reconciler)
            assert registry.workers == [worker]
            assert worker.draining is drained


async def test_changes_during_a_handshake_are_respected() -> None:
    p, d = workers()
    async with serving(p, d), reconciling() as (registry, reconciler):
        reconciler.update("file", {p.url: Role.PREFILL, d.url: Role.DECODE})
        handshakes = reconciler.reconcile()
        assert reconciler.reconcile() == [], "one handshake at a time"
        reconciler.update("file", {d.url: Role.DECODE})
        registry.join(
            await connect_server(registry.control, Role.DECODE, d.url)
        )  # announced, or added
        await asyncio.gather(*handshakes)
        assert [worker.url for worker in registry.workers] == [d.url]
        reconciler.update("file", {})
        await settle(reconciler)
        assert [worker.url for worker in registry.workers] == [d.url], "the source did not add it"


async def test_a_worker_that_is_listed_and_announces_itself_joins_once() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        members = Membership(
            registry, roles=(Role.DECODE,), token="", budget_s=10.0, clock=lambda: 0.0
        )
        announcement = Announcement(url=d.url, role=Role.DECODE, boot_id=d.boot_id)
        reconciler.update("file", {d.url: Role.DECODE})
        await asyncio.gather(members.handle(announcement), *reconciler.reconcile())
        assert [worker.url for worker in registry.workers] == [d.url]


async def test_a_process_with_two_urls_joins_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        alias = d.url.replace("127.0.0.1", "localhost")
        reconciler.update("file", {d.url: Role.DECODE, alias: Role.DECODE})
        await settle(reconciler)
        assert len(registry.workers) == 1
        assert "is the process that is known as" in caplog.text


async def test_another_process_at_a_url_that_is_listed_again_has_no_kv() -> None:
    _, d = workers()
    async with serving(d), reconciling() as (registry, reconciler):
        reconciler.update("file", {d.url: Role.DECODE})
        await settle(reconciler)
        (worker,) = registry.workers
        before, worker.in_flight = worker.identity, 1
        reconciler.update("file", {})
        await settle(reconciler)
        assert (worker.draining, registry.workers) == (True, [worker])
        d.boot_id = "another"
        reconciler.update("file", {d.url: Role.DECODE})
        await settle(reconciler)
        assert worker.ready
        assert worker.identity != before
