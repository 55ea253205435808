"""Our load generator against AIPerf: equal loads, one form, honest differences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eval.check_figures import ObservedTurn, as_text, compare, figures, of_aiperf, of_ours
from eval.check_load import LOAD_SHAPES, LoadShape, engine_means, plan, prompt_tokens, trace
from eval.cluster import ClientError, run_to_end
from eval.samples import Failure, Sample

TALK = LoadShape(3, qps=2.0, turns=3, first=10, later=4, reply=5, think_s=0.25)


def seen(turn: int = 1, **fields: Any) -> ObservedTurn:
    told: dict[str, Any] = {
        "conversation": "a", "sent_at_s": 0.0, "late_ms": 0.1, "prompt_tokens": 13,
        "output_tokens": 5, "cached_tokens": 0, "ttft_ms": 100.0, "tpot_ms": 10.0,
        "gaps": ((142, 4),),
    }  # fmt: skip
    return ObservedTurn(turn=turn, **{**told, **fields})


def record(**changes: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "usage_prompt_tokens": {"value": 13},
        "usage_completion_tokens": {"value": 5},
        "usage_prompt_cache_read_tokens": {"value": 2},
        "time_to_first_token": {"value": 88.8435},
        "inter_token_latency": {"value": 12.5},
        "inter_chunk_latency": {"value": [12.0, 13.0, 0.0, 25.0]},
    }
    told = {
        "x_correlation_id": "u1",
        "turn_index": 1,
        "credit_issued_ns": 1_000_000_000,
        "request_start_ns": 1_001_500_000,
    }
    return {"metadata": told, "metrics": metrics, "error": None} | changes


def test_both_hold_the_same_conversations_at_the_same_times() -> None:
    lines = list(trace(TALK, 7, random.Random(0)))
    prompts = [13, 13 + 5 + 8, 26 + 5 + 8]  # a template of 3, then of 4 tokens around the text
    conversations = plan(TALK, 7, prompts)
    starts = [line["timestamp"] for line in lines if "timestamp" in line]
    assert [1e3 * one.starts_at_s for one in conversations] == starts
    assert len(lines) == TALK.conversations * TALK.turns
    assert [len(line["text_input"]) for line in lines[:3]] == [10, 4, 4]
    assert [line.get("delay") for line in lines[:3]] == [None, 250.0, 250.0]
    assert len({line["text_input"] for line in lines}) == len(lines)
    first = conversations[0]
    assert [turn.new_tokens for turn in first.turns] == [13, 8, 8]
    assert [turn.think_s for turn in first.turns] == [0.0, 0.25, 0.25]
    context = [
        context + turn.new_tokens
        for context, turn in zip(first.contexts(), first.turns, strict=True)
    ]
    assert context == prompts
    assert all(shape.turns * shape.reply > 0 for shape in LOAD_SHAPES.values())


def test_prompts_must_be_as_long_in_every_conversation() -> None:
    two = LoadShape(2, qps=1.0, turns=2, first=1, later=1, reply=1, think_s=0.0)
    fine = [seen(1), seen(2, prompt_tokens=30), seen(1), seen(2, prompt_tokens=30)]
    assert prompt_tokens(fine, two) == [13, 30]
    with pytest.raises(ClientError, match=r"\[29, 30\]"):
        prompt_tokens([*fine, seen(2, prompt_tokens=29)], two)


def test_records_of_aiperf_are_read(tmp_path: Path) -> None:
    file = tmp_path / "profile_export.jsonl"
    failed = record(error={"message": "refused"})
    file.write_text("".join(json.dumps(one) + "\n" for one in (record(), failed)))
    (one,) = of_aiperf(file)
    assert (one.turn, one.prompt_tokens, one.output_tokens, one.cached_tokens) == (2, 13, 5, 2)
    assert (one.ttft_ms, one.tpot_ms, one.late_ms) == (88.844, 12.5, 1.5)
    assert sum(count for _, count in one.gaps) == 4
    assert one.last_token_at_s == pytest.approx(1.0015 + 0.088844 + 4 * 0.0125)


@pytest.mark.parametrize("line", ["{", "[]", json.dumps({"metadata": {}, "metrics": {}}), "7"])
def test_a_malformed_record_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "profile_export.jsonl"
    file.write_text(json.dumps(record()) + "\n" + line + "\n")
    with pytest.raises(ClientError, match=r"profile_export\.jsonl:2: "):
        of_aiperf(file)
    with pytest.raises(ClientError, match="wrote no"):
        of_aiperf(tmp_path / "none")


def test_ours_leave_failures_out() -> None:
    fields = {"sent_at_s": 1.0, "late_ms": 0.2, "context_tokens": 20, "new_tokens": 6}
    fine = Sample(0, 2, **fields, output_tokens=5, ttft_ms=50.0, tpot_ms=5.0, gaps=((3, 4),))  # type: ignore[arg-type]
    lost = Sample(1, 1, **fields, output_tokens=5, error="lost", failure=Failure.DROPPED)  # type: ignore[arg-type]
    (one,) = of_ours([fine, lost])
    assert (one.turn, one.prompt_tokens, one.ttft_ms) == (2, 26, 50.0)


def test_figures_of_a_run() -> None:
    told = figures([seen(), seen(2, sent_at_s=1.86, ttft_ms=100.0)])
    assert told["took_s"] == 2.0  # until the last token: 1.86 + 0.1 + 4 * 0.01
    assert told["output_tokens_per_s"] == 5.0
    assert told["ttft_ms"]["p50"] == 100.0
    assert told["itl_ms"]["n"] == 8


def test_differences_are_of_rounds_that_both_have() -> None:
    def row(client: str, number: int, ttft_ms: float) -> dict[str, Any]:
        run = figures([seen(ttft_ms=ttft_ms)])
        engine = {"time_to_first_token_ms": ttft_ms - 5} if client == "ours" else {}
        return {"kind": "single", "client": client, "round": number, "engine": engine, **run}

    rows = [row("ours", 0, 90.0), row("aiperf", 0, 100.0), row("aiperf", 1, 100.0)]
    rows += [row("ours", 1, 105.0), row("ours", 2, 1e6)]  # the last has nobody to compare with
    told = {one["metric"]: one for one in compare(rows)}
    ttft = told["ttft_ms mean"]
    assert (ttft["rounds"], ttft["ours"], ttft["aiperf"]) == (2, 97.5, 100.0)
    assert (ttft["difference"], ttft["least"], ttft["most"], ttft["percent"]) == (
        -2.5,
        -10,
        5,
        -2.5,
    )
    assert ttft["above_engine_ms"] is None  # not told for both
    assert told["tpot_ms p50"]["difference"] == 0.0
    assert "ttft_ms p99" in as_text(list(told.values()))


def test_what_the_engine_took_is_no_clients_doing() -> None:
    def row(client: str, number: int, ttft_ms: float, engine_ms: float) -> dict[str, Any]:
        engine = {"time_to_first_token_ms": engine_ms, "inter_token_latency_ms": 10.0}
        run = figures([seen(ttft_ms=ttft_ms)])
        return {"kind": "multi", "client": client, "round": number, "engine": engine, **run}

    rows = [row("ours", 0, 54.0, 50.0), row("aiperf", 0, 65.0, 60.0)]
    rows += [row("ours", 1, 75.0, 70.0), row("aiperf", 1, 47.0, 40.0)]
    told = {one["metric"]: one for one in compare(rows)}
    assert told["ttft_ms mean"]["above_engine_ms"] == [4.5, 6.0]
    assert told["tpot_ms mean"]["above_engine_ms"] == [0.0, 0.0]
    assert told["ttft_ms p50"]["above_engine_ms"] is None


def test_the_engines_means_are_of_what_came_between() -> None:
    before = {"time_to_first_token_seconds": (2.0, 10.0), "inter_token_latency_seconds": (0.0, 0.0)}
    after = {"time_to_first_token_seconds": (2.5, 15.0), "inter_token_latency_seconds": (0.0, 0.0)}
    assert engine_means(before, after) == {"time_to_first_token_ms": 100.0}


def test_a_failed_client_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs/client.log"
    with pytest.raises(ClientError, match="ended with 3; the end of"):
        run_to_end(["sh", "-c", "echo so it went; exit 3"], log)
    assert log.read_text() == "so it went\n"
