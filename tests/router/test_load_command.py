"""``ppd-eval load`` on fake workers: plain, behind a router, and where things go wrong."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.client import hold
from eval.dialects import DONE, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from eval.load import Target, run_load
from eval.raw_rows import appending
from eval.summary import Slo
from eval.traffic.conversations import Conversation, PlannedTurn
from eval.traffic.workloads import Demand
from ppd.errors import ConfigError, WorkerError

from .conftest import Cluster

SMALL = Demand("paper:small_tiny", conversations=8, qps=200, scale=0.125)
FIRST, FIRST_OUT, NEW, OUT = 16, 16, 2, 4  # an eighth of it
Body = dict[str, Any]


def answer(ids: list[int], prompt: int) -> bytes:
    counts = {"prompt_tokens": prompt, "cached_tokens": prompt - 1}
    meta = {"completion_tokens": len(ids), **counts}
    return event({"text": "x", "output_ids": ids, "meta_info": meta})


def begin(request: Request, tokens: int) -> None:
    """Send the first tokens of an answer."""
    for n in range(1, tokens + 1):
        request.send(answer(list(range(100, 100 + n)), len(request.body["input_ids"])))


async def whole(request: Request) -> None:
    begin(request, request.body["sampling_params"]["max_new_tokens"])
    request.send(DONE)


async def resets(request: Request) -> None:
    begin(request, 1)
    request.drop()


async def hangs(request: Request) -> None:
    begin(request, 1)
    await asyncio.Event().wait()


async def ends_early(request: Request) -> None:
    begin(request, 2)


async def is_short(request: Request) -> None:
    begin(request, 2)
    request.send(DONE)


async def tells_an_error(request: Request) -> None:
    begin(request, 1)
    request.send(event({"error": {"message": "gone", "code": 500}}) + DONE)


async def refuses(request: Request) -> None:
    request.answer({"error": {"message": "full"}}, status=503)


async def babbles(request: Request) -> None:
    request.send(b"data: {broken\n\n" + DONE)


async def brings_nothing(request: Request) -> None:
    ids = [100] * request.body["sampling_params"]["max_new_tokens"]
    request.send(event({"output_ids": ids, "meta_info": {"completion_tokens": 0}}) + DONE)


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first, and so on; all others a whole answer."""
    left = list(scripts)

    async def script(request: Request) -> None:
        await (left.pop(0) if left else whole)(request)

    return script


async def load(
    url: str, demand: Demand, out: Path, timeout_s: float = 20.0, slo: Slo | None = None
) -> list[dict[str, Any]]:
    """Its raw rows. The command runs a loop of its own, in a thread."""
    target = Target(url, timeout_s, slo or Slo(ttft_ms=60_000))
    assert await asyncio.to_thread(run_load, demand, target, out) == 0
    return rows_in(out)


def rows_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_a_workload_is_kept_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeWorker("null", whole)
    async with engine.serving():
        rows = await load(engine.url, SMALL, tmp_path / "rows.jsonl")
    begun, *turns, ended = rows
    assert [begun["row"], ended["row"]] == ["begin", "run"]
    assert {"commit", "hardware", "seed", "at"} <= begun.keys() & ended.keys()
    assert len(turns) == 16
    assert {turn["run"] for turn in turns} == {begun["run"]}
    for turn in turns:
        assert turn["error"] == ""
        assert 0 < turn["ttft_ms"] <= turn["e2e_ms"]
        assert sum(count for _, count in turn["gaps"]) == turn["output_tokens"] - 1
    prompts: list[list[int]] = [body["input_ids"] for body in engine.bodies]
    firsts = [ids for ids in prompts if len(ids) == FIRST]
    laters = [ids for ids in prompts if len(ids) == FIRST + FIRST_OUT + NEW]
    assert len(firsts) == len(laters) == 8
    assert len({tuple(ids) for ids in firsts}) == 8
    reply = list(range(100, 100 + FIRST_OUT))
    for ids in laters:
        assert ids[:FIRST] in firsts
        assert ids[FIRST : FIRST + FIRST_OUT] == reply, "the live one, not a placeholder"
    shown = capsys.readouterr().out
    told = json.loads(shown.splitlines()[-1])
    assert told["success_rate"] == 1.0
    assert told["slo_share"] == 1.0
    assert told["late_ms"]["n"] == 16
    assert told["latencies"]["later"]["ttft_ms"]["n"] == 8
    assert "8 conversations, 16 turns" in shown
    assert "goodput" in shown
    assert "reported results take 200" in shown


async def test_whatever_goes_wrong_is_counted_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = (hangs, resets, ends_early, is_short, tells_an_error, refuses, babbles)
    engine = FakeWorker("null", in_turn(*faults, brings_nothing))
    demand = replace(SMALL, conversations=9)
    async with engine.serving():
        rows = await load(engine.url, demand, tmp_path / "rows.jsonl", timeout_s=1.0)
    failures = Counter(row["failure"] for row in rows if row["row"] == "turn")
    assert failures == {
        "timeout": 1, "dropped": 2, "short": 1, "error": 1, "refused": 1, "malformed": 2, None: 2,
    }  # fmt: skip
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["planned"], told["sent"], told["ok"], told["failed"]) == (18, 10, 2, 8)
    assert told["success_rate"] == 0.1111
    assert told["valid"] is False
    timed_out = next(row for row in rows if row.get("failure") == "timeout")
    assert 900 < timed_out["e2e_ms"] < 5000


async def test_a_slow_drip_is_a_timeout(tmp_path: Path) -> None:
    async def drips(request: Request) -> None:
        request.start()
        while True:
            request.send(b": still here\n\n")
            await asyncio.sleep(0.05)

    engine = FakeWorker("null", drips)
    demand = Demand("paper:small_tiny", conversations=1, qps=200, scale=0.125)
    async with engine.serving():
        rows = await load(engine.url, demand, tmp_path / "rows.jsonl", timeout_s=0.5)
    assert rows[1]["failure"] == "timeout"


async def test_behind_a_router_later_turns_go_their_way(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = FakeWorker("prefill", whole), FakeWorker("decode", whole)
    async with cluster(prefill, decode) as client:
        # Not scaled: a few tokens are not worth a home.
        demand = Demand("paper:small_tiny", conversations=8, qps=200)
        await load(client.url, demand, tmp_path / "rows.jsonl")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["success_rate"] == 1.0
    assert told["routes"] == {"remote": 8, "local": 8}


async def test_behind_a_router_a_lost_worker_is_a_failure(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = FakeWorker("prefill", whole), FakeWorker("decode", in_turn(hangs, resets))
    async with cluster(prefill, decode, resume_streams=0) as client:
        await load(client.url, SMALL, tmp_path / "rows.jsonl", timeout_s=1.0)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["failed"] == 2
    assert told["failures"]["timeout"] == 1
    assert told["ok"] == 12


async def test_what_the_model_cannot_hold_is_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    engine = FakeWorker("null", whole, max_model_len=1000)
    demand = Demand("paper:large_tiny", conversations=1, qps=1)
    out = tmp_path / "rows.jsonl"
    async with engine.serving():
        with pytest.raises(ConfigError, match=r"grows to 2096 tokens, .* 1000: --scale 0.477"):
            await load(engine.url, demand, out)
    assert engine.bodies == []
    assert out.read_text() == ""


async def test_requests_name_the_model_and_carry_the_key(tmp_path: Path) -> None:
    engine, out = FakeWorker("null", whole), tmp_path / "rows.jsonl"
    async with engine.serving():
        target = Target(engine.url, 20.0, Slo(), model="red", api_key="a secret")
        assert await asyncio.to_thread(run_load, SMALL, target, out) == 0
    assert {body["model"] for body in engine.bodies} == {"red"}
    assert {headers["authorization"] for headers in engine.headers} == {"Bearer a secret"}
    assert "secret" not in out.read_text() + repr(target)


async def test_where_nobody_answers_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no answer"):
        await load("http://127.0.0.1:9", SMALL, tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (Target("localhost:1", 1.0, Slo()), "url must begin with http"),
        (Target("http://127.0.0.1:9", 0.0, Slo()), "timeout_s must be above 0"),
        (Target("http://127.0.0.1:9", 1.0, Slo(ttft_ms=-1)), "slo_ttft_ms must be above 0"),
    ],
)
def test_wrong_options_are_refused(target: Target, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        run_load(SMALL, target, None)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        run_load(SMALL, Target("http://127.0.0.1:9", 1.0, Slo()), tmp_path)


def test_a_wrong_command_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="ppd-eval: workload nix: no such kind") as ended:
        cli.main(["load", "--url", "http://127.0.0.1:9", "--workload", "nix", "--qps", "1"])
    assert "\n" not in str(ended.value.code)


async def test_prompts_follow_the_plan() -> None:
    """A shared beginning, a cut history, and times that follow arrivals and thinking."""
    exchanges = (
        PlannedTurn(40, 4),
        PlannedTurn(10, 4, gap_s=0.2),
        PlannedTurn(10, 4, think_s=0.1, keep_tokens=45),
    )
    plan = [Conversation(0.05 * n, exchanges, shared_tokens=20) for n in range(3)]
    engine = FakeWorker("null", whole)
    async with engine.serving():
        samples = await hold(engine.url, plan, seed="s", vocabulary=range(32, 96))
    prompts = {len(body["input_ids"]): list[list[int]]() for body in engine.bodies}
    for body in engine.bodies:
        prompts[len(body["input_ids"])].append(body["input_ids"])
    assert {size: len(ids) for size, ids in prompts.items()} == {40: 3, 54: 3, 55: 3}
    assert len({tuple(ids[:20]) for ids in prompts[40]}) == 1
    assert len({tuple(ids[20:]) for ids in prompts[40]}) == 3
    for ids in prompts[55]:
        assert any(ids[:45] == earlier[:45] for earlier in prompts[54])
    assert all(token in range(32, 96) for ids in prompts[40] for token in ids)
    for sample in samples:
        assert not sample.error
        assert sample.late_ms >= 0
    first, second, third = samples[:3]
    assert [s.context_tokens for s in (first, second, third)] == [0, 44, 45]
    ended_s = first.sent_at_s + first.e2e_ms / 1e3
    due_s = max(0.2, ended_s)  # the turn before was due at 0
    assert second.sent_at_s - second.late_ms / 1e3 == pytest.approx(due_s, abs=0.005)
    due_s = second.sent_at_s + second.e2e_ms / 1e3 + 0.1
    assert third.sent_at_s - third.late_ms / 1e3 == pytest.approx(due_s, abs=0.005)


async def test_conversations_of_one_system_prompt_begin_alike() -> None:
    turns = (PlannedTurn(40, 2),)
    plan = [Conversation(0.0, turns, shared_tokens=20, shared_prompt=n) for n in (0, 1, 2, 1, 2)]
    engine = FakeWorker("null", whole)
    async with engine.serving():
        await hold(engine.url, plan, seed="s", vocabulary=range(32, 96))
    prompts = [tuple(body["input_ids"]) for body in engine.bodies]
    assert sorted(Counter(ids[:20] for ids in prompts).values()) == [1, 2, 2]
    assert len({ids[20:] for ids in prompts}) == 5


def test_rows_are_not_glued_to_what_a_killed_run_left(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"row": "begin"}\n{"row": "tu')
    with appending(out) as write:
        write({"row": "begin"})
    assert rows_in(out) == [{"row": "begin"}] * 2
