"""Periodic health checks of workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

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
