"""``ppd-eval emulate compare``: errors, and how much of them may be chance."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from eval.emulation.clusters import Run
from eval.emulation.compare import compare, middle, simulate, values
from ppd.errors import ConfigError

PROFILE = "llama-3.1-8b-h100-tp1"
WORKLOAD = "turns:2?first=2048&first_out=16&new=256&out=16&think_s=0.5"
RUN = Run(WORKLOAD, "full", 8.0, 0, 24, 40.0, 100.0, "load")
OF_RUN = {**asdict(RUN), "shape": "1P1D", "profile": PROFILE, "calibration": "device"}


def rows(*factors: float, seed: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run that took some of these times as long as its simulation, drawn for each turn."""
    source = random.Random(seed)
    turns = [
        {
            **OF_RUN, "row": "turn", "conversation": turn.session, "turn": turn.turn,
            "output_tokens": turn.output_tokens, "ttft_ms": turn.ttft_ms * factor,
            "tpot_ms": turn.tpot_ms * factor, "error": "",
        }
        for turn in simulate(RUN, "1P1D", PROFILE, "device")
        for factor in [source.choice(factors)]
    ]  # fmt: skip
    return {**OF_RUN, "row": "run", "commit": "c"}, turns


def test_a_difference_in_each_turn_is_no_chance() -> None:
    found = compare(*rows(1.25))
    assert [one["metric"] for one in found] == ["t1_ttft_p50_ms", "t2_ttft_p50_ms", "tpot_p50_ms"]
    for one in found:
        assert one["error"] == pytest.approx(-0.2, abs=1e-4)
        assert one["error_interval"] == pytest.approx([-0.2, -0.2], abs=1e-4)
        assert (one["emulated_commit"], one["profile"]) == ("c", PROFILE)


def test_a_difference_in_some_turns_may_be_chance() -> None:
    for one in compare(*rows(0.8, 1.25)):
        low, high = one["error_interval"]
        assert low <= one["error"] <= high
        assert low < 0 < high


def test_turns_of_other_runs_and_failed_ones_do_not_count() -> None:
    row, turns = rows(1.0)
    others = [{**turn, "seed": 1, "ttft_ms": 1e6} for turn in turns]
    failed = [{**turn, "error": "timeout", "ttft_ms": 1e6} for turn in turns]
    assert compare(row, [*others, *turns, *failed]) == compare(row, turns)
    assert compare(row, [*others, *failed]) == []


def test_the_medians_are_of_the_turns_that_a_run_counts() -> None:
    turns = simulate(RUN, "1P1D", PROFILE, "device")
    found = values(turns)
    assert {len(of_turns) for of_turns in found.values()} == {24, 48}
    assert middle(found["t1_ttft_p50_ms"]) > middle(found["t2_ttft_p50_ms"])


def test_speculation_is_not_simulated() -> None:
    with pytest.raises(ConfigError, match="the simulator has no speculative decoding"):
        compare({**OF_RUN, "drafts": "eagle", "commit": "c"}, [])
