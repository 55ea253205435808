"""Periodic health checks of workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from ppd.contract import Role
from router.workers.registry import WorkerRegistry
from router.workers.worker import Server, Worker
from tests.waiting import HANG_S

from ..fixtures import model_workers


class FaultyRegistry(WorkerRegistry):
    """A registry whose health check of its first server raises; it counts the checks."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(control=None)  # type: ignore[arg-type]
        self.checks: Counter[str] = Counter()
        for worker in workers:
            self.join(worker.server)

    async def check(self, server: Server) -> None:
        self.checks[server.url] += 1
        if server is self.servers[0]:
            raise RuntimeError("a bug")


async def test_a_health_check_that_raises_is_logged_and_all_checks_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = FaultyRegistry(model_workers(prefill=1, decode=1).workers)
    faulty, sound = (worker.url for worker in pool.workers)
    probing = asyncio.create_task(pool.probe_forever(0.001))
    async with asyncio.timeout(HANG_S):
        while min(pool.checks[faulty], pool.checks[sound]) < 3:
            await asyncio.sleep(0)
            assert not probing.done()
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    assert len(caplog.records) >= 2
    for record in caplog.records:
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], RuntimeError)
        assert faulty in record.getMessage()
        assert sound not in record.getMessage()


async def test_a_server_that_left_during_its_check_is_not_revived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = WorkerRegistry(control=None)  # type: ignore[arg-type]
    server = model_workers(prefill=1, decode=1).workers[1].server
    registry.join(server)
    server.alive = False
    answers = asyncio.Event()
    joined: list[Worker] = []

    async def connect(control: object, role: Role, url: str) -> Server:
        await answers.wait()
        return Server(url, role, server.handshake)

    monkeypatch.setattr("router.workers.registry.connect_server", connect)
    registry.on_join = joined.append
    check = asyncio.create_task(registry.check(server))
    await asyncio.sleep(0)
    registry.leave(server)
    answers.set()
    await check
    assert (server.alive, joined, registry.servers) == (False, [], [])
    registry.leave(server)  # it has left already
