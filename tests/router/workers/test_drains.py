"""Operators' drains of workers whose process is another one than a router has seen."""

from __future__ import annotations

import aiohttp
import pytest

from ppd.contract import Role
from ppd.shared_records import DrainRecord
from router.admin.peer_state import WorkerChanges
from router.shared.drains import DrainSharing
from router.workers.handshake import connect_server
from router.workers.registry import WorkerRegistry

from ..fixtures import model_workers, serving, workers


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_drain_at_another_router_holds_when_this_one_sees_the_restart(
    resumed: bool,
) -> None:
    _, d = workers()
    async with serving(d), aiohttp.ClientSession() as control:
        registry = WorkerRegistry(control)
        registry.join(await connect_server(control, Role.DECODE, d.url))
        (server,) = registry.servers
        sharing = DrainSharing(registry, "here", lambda _: None, lambda: 0.0)
        d.boot_id = "of the new process"
        sharing.apply([DrainRecord(d.url, d.boot_id, True, 1, "there")])
        if resumed:
            sharing.apply([DrainRecord(d.url, d.boot_id, False, 2, "there")])
        assert not server.draining
        server.alive = False
        await registry.check(server)
        assert server.alive
        assert server.draining is not resumed


def test_a_drain_that_a_restart_has_ended_is_no_change() -> None:
    registry = WorkerRegistry(control=None)  # type: ignore[arg-type]
    server = model_workers(prefill=1, decode=1).workers[0].server
    registry.join(server)
    changes = WorkerChanges()
    server.draining = True
    changes.record_drained(server)
    assert changes.without_lost(registry).drained == {server.url: server.handshake.boot_id}
    server.draining = False  # by a restart
    assert changes.without_lost(registry).drained == {}
    registry.leave(server)
    assert server.url in changes.without_lost(registry).drained, "it may join again"
