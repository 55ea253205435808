"""The decision log of a running router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eval.fake_worker.request import Request, Script
from eval.replay_decisions import Changes, run_replay
from ppd.contract import Refusal, RefusalReason
from ppd.errors import ConfigError
from ppd.journal import Decided, Finished, read
from ppd.score import Weights
from ppd.table_policy import Correction
from tests.unit.fixtures import costs_of

from ..conftest import Client, Cluster
from ..fixtures import LATER, always_remote, workers, write_table
from ..scripts import answering, failing, hanging

REFUSAL = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS, cached_tokens=0, min_cached_tokens=64)


async def hold_some(client: Client, count: int) -> None:
    async def one(number: int) -> None:
        contents = [f"conversation {number}"]
        for turn in range(4):
            await client.chat(*contents, stream=number % 3 != 0)
            contents += ["w0w1w2", f"more {turn} " + "x" * 40 * (number % 7)]

    await asyncio.gather(*(one(number) for number in range(count)))


async def test_a_log_reproduces_every_decision(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = write_table(tmp_path / "t.json", costs_of), tmp_path / "decisions.jsonl"
    options: dict[str, Any] = {
        "policy": "ppd", "table": str(path), "decision_log": str(log),
        "corrections": frozenset(Correction), "append_budget_tokens": 1000,
    }  # fmt: skip
    for _ in range(2):  # two runs of the router in one log
        async with cluster(*workers(), **options) as client:
            await hold_some(client, 12)
    events = list(read(log.read_bytes().splitlines(keepends=True)))
    routes = {e.decision.route for e in events if isinstance(e, Decided) and e.features}
    assert routes == {"local", "remote"}, "both routes must occur"
    assert sum(isinstance(e, Finished) for e in events) == 2 * 12 * 4

    def replayed(**changes: Any) -> dict[str, Any]:
        same = {"table": path, "policy": None, "corrections": None, "objective": None}
        run_replay(log, Changes(**{**same, **changes}), 5)
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    again = replayed()
    assert again["decisions"] == again["identical"] == 2 * 12 * 4
    assert again["changed"] == 0
    assert again["local_share_before"] == again["local_share_after"]
    assert replayed(policy="pd")["local_share_after"] == 0
    assert replayed(policy="full")["local_share_after"] == 1
    assert replayed(policy="replica")["changed"] == 2 * 12 * 4
    free = frozenset[Correction]()
    shares = [
        replayed(corrections=free, objective=Weights(1, tpot))["local_share_after"]
        for tpot in (0, 1, 2, 5, 10)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]
    other = write_table(tmp_path / "other.json", always_remote)
    assert replayed(table=other, corrections=free)["local_share_after"] == 0
    with pytest.raises(ConfigError, match="give one by --table"):
        replayed(table=None)


async def resetting_at_once(request: Request) -> None:
    request.start()
    request.drop()


async def test_every_decision_has_an_end_and_gives_its_tokens_back(
    cluster: Cluster, tmp_path: Path, table: Path
) -> None:
    """Answers, refusals, lost workers, errors and clients that hang up."""
    behaviour: list[Script] = []

    async def scripted(request: Request) -> None:
        script = (
            behaviour[0] if "custom_params" in request.body else answering(prompt=100, cached=96)
        )
        await script(request)

    log = tmp_path / "decisions.jsonl"
    p, d = workers(scripted)
    options: dict[str, Any] = {"policy": "ppd", "table": str(table), "decision_log": str(log)}

    async def hang_up(client: Client) -> None:
        d.arrived.clear()
        d.hung_up.clear()
        task = asyncio.create_task(client.chat(*LATER, stream=True))
        await d.arrived.wait()
        task.cancel()
        await d.hung_up.wait()

    async with cluster(p, d, **options) as client:
        await client.chat("hello")
        for script in (answering(100, 96), failing(503, REFUSAL.to_message()), resetting_at_once):
            behaviour[:] = [script]
            assert (await client.chat(*LATER, stream=True)).status == 200
        behaviour[:] = [failing(400, "no")]
        assert (await client.chat(*LATER)).status == 400
        behaviour[:] = [hanging]
        await hang_up(client)
        for engine in (p, d):
            labels = {"role": engine.role, "worker": engine.url}
            assert await client.metric("ppd_worker_backlog_tokens", **labels) == 0
    events = list(read(log.read_bytes().splitlines(keepends=True)))
    ends = {e.number: (e.route, e.outcome) for e in events if isinstance(e, Finished)}
    assert list(ends.values()) == [
        ("remote", "answered"),
        ("local", "answered"),
        ("remote", "answered"),
        ("remote", "answered"),
        ("local", "rejected"),
        ("local", "disconnected"),
    ]
    assert ends.keys() == {e.number for e in events if isinstance(e, Decided)}


async def test_a_log_goes_on_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    for _ in range(2):
        async with cluster(*workers(), decision_log=str(log)) as client:
            await client.chat("hello")
        log.write_bytes(log.read_bytes()[:-20])  # killed in mid-write
    events = list(read(log.read_bytes().splitlines(keepends=True)))
    assert [type(event).__name__ for event in events] == ["Opened", "Decided"] * 2


async def test_a_log_that_cannot_be_written_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the decision log cannot be written: .*directory"):
        async with cluster(*workers(), decision_log=str(tmp_path)):
            pass
