"""``ppd-eval soak router``, small: a router of this process, workers that are killed for real."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.chaos.accounting import (
    ClientCounts,
    Disruption,
    Injection,
    RouterCounts,
    differences,
    explain,
    outcome_of,
)
from eval.chaos.command import OPTIONS, ROLES
from eval.chaos.drive import Target, drive
from eval.chaos.schedule import WorkerProcesses
from eval.cluster import launching
from eval.faults.command import MODEL
from eval.http_stream import Reply
from router.config.options import RouterConfig
from router.server.run import running


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[WorkerProcesses]:
    with launching(tmp_path) as launch:
        some = WorkerProcesses(launch, MODEL)
        for role in ROLES:
            some.add(role)
        yield some


@pytest.mark.parametrize("more", [{}, {"resume_streams": 0, "decode_fallback": False}])
async def test_nothing_is_lost_under_load_and_unrest(
    workers: WorkerProcesses, caplog: pytest.LogCaptureFixture, more: dict[str, Any]
) -> None:
    caplog.set_level("WARNING")
    urls = {role: tuple(slot.url for slot in workers.of(role)) for role in ROLES}
    options = OPTIONS | more
    config = RouterConfig(prefill=urls["prefill"], decode=urls["decode"], port=0, **options)
    async with running(config) as url:
        tasks = await fewest_tasks()
        target = Target(int(url.rpartition(":")[2]), os.getpid())
        run = await drive(target, workers, requests=2000, clients=24, seed=1)
        assert run.unexplained == []
        assert run.differences == []
        assert run.router_counts.in_flight == run.router_counts.backlog_tokens == 0
        assert run.descriptors[1] <= run.descriptors[0]
        assert await fewest_tasks() <= tasks
        assert run.injections, "something was done to the workers"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    known = ("truncated stream from", "fails request after request", "(decode_fallback)")
    assert [error for error in errors if not any(mark in error for mark in known)] == []


async def fewest_tasks() -> int:
    """In a while: probes come and go."""
    seen = list[int]()
    while len(seen) < 30:
        seen.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0.01)
    return min(seen)


def reply(status: int, body: bytes, *, streams: bool = True, **fields: object) -> Reply:
    kind = "text/event-stream" if streams else "application/json"
    one = Reply(status=status, headers={"content-type": kind}, body=body, whole=True)
    for name, value in fields.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("one", "outcome"),
    [
        (reply(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n'), "ok"),
        (reply(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n', left=True), "ok"),
        (reply(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n', left=True, whole=False), "ok"),
        (reply(200, b'data: {"a": 1}\n\n', left=True, whole=False), "disconnected"),
        (reply(200, b'data: {"a": 1}\n\n', whole=False), "no_end"),
        (reply(200, b'data: {"a": 1}\n\n'), "no_end"),
        (
            reply(
                200,
                b'data: {"error": {"message": "x", "type": "worker_error", "code": 502}}\n\n'
                b"data: [DONE]\n\n",
            ),
            "truncated",
        ),
        (
            reply(
                200,
                b'data: {"error": {"message": "x", "type": "InternalServerError", "code": 500}}\n\n'
                b"data: [DONE]\n\n",
            ),
            "worker_error",
        ),
        (reply(400, b'{"error": {"message": "x"}}', streams=False), "rejected"),
        (
            reply(500, b'{"error": {"message": "x", "type": "router_error"}}', streams=False),
            "internal_error",
        ),
        (reply(503, b'{"error": {"message": "x"}}', streams=False), "worker_error"),
    ],
)
def test_the_outcome_follows_from_what_the_client_got(one: Reply, outcome: str) -> None:
    assert outcome_of(one) == outcome


def test_an_error_needs_a_trouble_of_that_role_and_time() -> None:
    lost = reply(
        502, b'{"error": {"message": "decode worker did not answer"}}', streams=False,
        sent_s=100.0, ended_s=101.0,
    )  # fmt: skip
    roles = {"prefill": 1, "decode": 2}

    def explained(role: str, began_s: float) -> str | None:
        return explain(lost, [Injection(role, "w", Disruption.KILL, began_s, began_s + 0.5)], roles)

    assert explained("decode", 100.5) == "kill"
    assert explained("prefill", 100.5) is None
    assert explained("decode", 102.0) is None
    assert explained("decode", 50.0) is None


def test_one_request_more_or_less_is_a_difference() -> None:
    counts, path = ClientCounts(), "/generate"
    counts.finished[path, "ok"] = 2
    router_counts = RouterCounts(
        finished=counts.finished.copy(),
        turns=counts.turns.copy(),
        streams=counts.streams.copy(),
        resumed=0,
        in_flight=0,
        backlog_tokens=0,
    )
    assert differences(counts, router_counts) == []
    router_counts.finished[path, "ok"] += 1
    assert differences(counts, router_counts) == ["finished /generate ok: client 2, router 3"]


def test_who_hangs_up_in_the_last_moment_may_be_counted_either_way() -> None:
    counts, path = ClientCounts(), "/generate"
    counts.finished[path, "ok"] = 2
    counts.uncertain[path, "ok", "disconnected"] = 1
    router_counts = RouterCounts(
        finished=Counter({(path, "ok"): 1, (path, "disconnected"): 1}),
        turns=Counter(),
        streams=Counter(),
        resumed=0,
        in_flight=0,
        backlog_tokens=0,
    )
    assert differences(counts, router_counts) == []
    router_counts.finished[path, "ok"], router_counts.finished[path, "disconnected"] = 0, 2
    assert len(differences(counts, router_counts)) == 2


def test_one_uncertain_request_may_take_the_place_of_another_one() -> None:
    counts, path = ClientCounts(), "/generate"
    counts.finished.update({(path, "ok"): 2, (path, "disconnected"): 1})
    counts.uncertain[path, "ok", "disconnected"] = 1
    router_counts = RouterCounts(
        finished=Counter({(path, "ok"): 1, (path, "disconnected"): 1, (path, "truncated"): 1}),
        turns=Counter(),
        streams=Counter(),
        resumed=0,
        in_flight=0,
        backlog_tokens=0,
    )
    assert len(differences(counts, router_counts)) == 2  # none of them may have been truncated
    counts.uncertain[path, "disconnected", "truncated"] = 1
    assert differences(counts, router_counts) == []
    other = "/v1/completions"  # what is uncertain on one endpoint excuses nothing on another one
    counts.finished[other, "ok"] += 1
    router_counts.finished[other, "truncated"] += 1
    assert len(differences(counts, router_counts)) == 2
