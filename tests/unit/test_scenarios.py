"""The six scenarios: plans, flags, order, medians, ratios."""

from __future__ import annotations

from typing import Any

import pytest

from eval import cli
from eval.scenarios import (
    NAMES,
    ONE,
    PD,
    POST,
    PPD,
    RATIOS,
    SCENARIOS,
    TWO,
    _order,
    as_text,
    plan,
    ratios,
    sides_of,
    summarize,
    worker_flags,
)
from ppd.contract import Role

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def spread(mean: float) -> dict[str, float]:
    return {"n": 4, "mean": mean, "p50": mean, "p90": 2 * mean, "p99": 3 * mean, "max": 4 * mean}


def run_row(name: str, side: str, turns: int = 1, **changes: Any) -> dict[str, Any]:
    told = {"ttft_ms": spread(100.0), "tpot_ms": spread(5.0), "itl_ms": spread(6.0)}
    first = told | {"e2e_ms": spread(700.0)}
    later = first if turns > 1 else dict.fromkeys(first)
    row = {"name": name, "side": side, "turns": turns, "planned": 4, "ok": 4, "wall_s": 2.0}
    row |= {"output_tokens_per_s": 64.0, "latencies": {"all": first, "first": first}}
    row["latencies"]["later"] = later  # type: ignore[index]
    return row | changes


def test_the_posts_six_at_any_scale() -> None:
    assert set(POST) == set(NAMES)
    for scenario in SCENARIOS:
        conversations = plan(scenario, 3, 16)
        assert len(conversations) == scenario.requests
        for conversation in conversations:
            assert len(conversation.turns) == 3
            assert {turn.new_tokens for turn in conversation.turns} == {16 * scenario.prompt}
            assert {turn.output_tokens for turn in conversation.turns} == {16 * scenario.reply}
    apart = [one.starts_at_s for one in plan(BY_NAME["staggered"], 1, 2)]
    assert apart == pytest.approx([0.1 * number for number in range(8)])
    assert {one.starts_at_s for one in plan(BY_NAME["stress"], 1, 2)} == {0.0}


def test_monolithic_workers_mix_chunks_into_decodes_under_the_same_limits() -> None:
    flags = worker_flags(BY_NAME["batch-pressure"], 16)
    replica, decode = flags.of(Role.REPLICA), flags.of(Role.DECODE)
    assert set(decode) < set(replica)
    assert set(replica) - set(decode) == {"--enable-mixed-chunk"}
    assert decode[decode.index("--max-running-requests") + 1] == "2"
    assert decode[decode.index("--chunked-prefill-size") + 1] == str(12 * 16)
    assert "--max-running-requests" not in flags.of(Role.PREFILL)


def test_single_turns_have_nothing_for_ppd_to_choose_and_sides_change_places() -> None:
    assert PPD not in sides_of(1)
    assert PPD in sides_of(2)
    one, two = (list(_order(SCENARIOS[:1], (3,), number)) for number in (0, 1))
    assert [side for _, _, side in one] == [side for _, _, side in two][::-1]


def test_cells_are_medians_over_rounds_and_count_what_failed() -> None:
    rows = [run_row("smoke", "pd", wall_s=wall_s) for wall_s in (1.0, 9.0, 2.0)]
    rows[1]["ok"] = 3
    (cell,) = summarize(rows)
    assert (cell["rounds"], cell["wall_s"], cell["failed"]) == (3, 2.0, 1)
    assert (cell["ttft_ms"], cell["ttft_p90_ms"], cell["itl_p99_ms"]) == (100.0, 200.0, 18.0)
    assert cell["later_ttft_ms"] is None
    assert "smoke" in as_text([cell])


def test_ratios_compare_the_same_scenario_with_the_same_turns() -> None:
    rows = [
        run_row("smoke", TWO.name, output_tokens_per_s=50.0),
        run_row("smoke", PD.name, output_tokens_per_s=100.0),
        run_row("smoke", PD.name, turns=3, output_tokens_per_s=10.0),
        run_row("stress", PD.name),
    ]
    cells = summarize(rows)
    assert ratios(cells, 1, PD.name, TWO.name, RATIOS) == {"smoke": (2.0, 1.0, 1.0)}
    assert ratios(cells, 1, PD.name, ONE.name, RATIOS) == {}


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--scale", "0"], ["--turns", "1", "0"]])
def test_senseless_options_are_refused(wrong: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["traffic", "scenarios", *wrong])
    assert "must be at least 1" in str(ended.value)
