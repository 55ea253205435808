"""Runs on emulated clusters: shapes, slow motion, stretched plans, compressed samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from eval.emulation.clusters import (
    SHAPES,
    Run,
    compressed,
    median,
    quantile,
    ranks_of,
    roles_of,
    slow_motion_for,
    stretched,
)
from eval.emulation.command import kept_rows
from eval.profiles.profile import load_profile
from eval.raw_rows import append_whole
from eval.samples import Sample
from eval.traffic.conversations import Conversation, PlannedTurn
from ppd.contract import Role
from ppd.errors import ConfigError


def test_shapes() -> None:
    assert all(roles_of(shape) for shape in SHAPES)
    assert roles_of("1P2D") == [("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)]
    assert roles_of("1P1Dx2") == [("p0", Role.PREFILL), ("d0", Role.DECODE)]
    assert [ranks_of(shape) for shape in ("2P2D", "4R", "1P2Dx4")] == [1, 1, 4]
    assert roles_of("2R") == [("r0", Role.REPLICA), ("r1", Role.REPLICA)]
    for wrong in ("", "1P", "2D", "0P1D", "1P1D1R", "4r"):
        with pytest.raises(ConfigError, match="no such shape"):
            roles_of(wrong)


def test_arrivals_and_pauses_are_stretched_and_samples_compressed() -> None:
    turns = (PlannedTurn(100, 10), PlannedTurn(50, 10, think_s=2.0, gap_s=1.0))
    (slow,) = stretched([Conversation(3.0, turns)], 40.0)
    assert slow.starts_at_s == 120.0
    assert slow.turns[1] == PlannedTurn(50, 10, think_s=80.0, gap_s=40.0)
    sample = Sample(0, 1, 80.0, 40.0, 0, 100, 10, ttft_ms=4000, tpot_ms=280, e2e_ms=8000)
    found = compressed(sample, 40.0)
    assert (found.sent_at_s, found.ttft_ms, found.tpot_ms, found.e2e_ms) == (2.0, 100, 7, 200)
    assert (found.late_ms, found.context_tokens) == (1.0, 0)


def test_more_load_needs_more_slow_motion() -> None:
    light = [Conversation(float(i), (PlannedTurn(100, 10),)) for i in range(20)]
    heavy = [Conversation(i / 100, (PlannedTurn(100, 1000),)) for i in range(2000)]
    assert 10.0 <= slow_motion_for(2, light) < slow_motion_for(2, heavy)


def test_runs_of_a_plan_are_the_same_each_time() -> None:
    run = Run("turns:3?think_s=2", "full", 2.0, 0, 5, 40.0, 100.0)
    assert run.plan() == run.plan()
    assert len(run.plan()) == 5


def test_system_prompts_are_drawn_by_zipfs_law() -> None:
    workload = "grid?context=9000&new=100&out=8&turns=2&shared=8000&prompts=8"
    plan = Run(workload, "full", 2.0, 0, 400, 40.0, 100.0, "load").plan()
    drawn = Counter(one.shared_prompt for one in plan)
    assert set(drawn) == set(range(8))
    assert drawn[0] > 2 * drawn[3] > 0
    assert {one.shared_tokens for one in plan} == {8000}


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([], 0.99) is None
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.0


def test_rows_of_another_profile_are_not_continued(tmp_path: Path) -> None:
    profile, out = load_profile("llama-3.1-8b-h100-tp1"), tmp_path / "rows.jsonl"
    assert kept_rows(None, profile) == kept_rows(out, profile) == []
    row = {"row": "run", **profile.provenance()}
    append_whole(out, [row])
    with out.open("ab") as file:
        file.write(b'{"row": "tu')  # a kill cut it short
    assert kept_rows(out, profile) == [row]
    with pytest.raises(ConfigError, match="another profile"):
        kept_rows(out, load_profile("qwen3-32b-h100-tp2"))
