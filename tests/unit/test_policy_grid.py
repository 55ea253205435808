"""Policies side by side: the cross of points, order, what is measured already, who wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.policies.cells import BOTH, THROUGHPUT, TPOT, TTFT, as_text, summarize, winners
from eval.policies.grid import SIDES, Grid, Point, measured, order
from eval.samples import Sample, columns
from ppd.errors import ConfigError

GRID = Grid(qps=(1.0, 2.0), turns=(2, 4, 8), fixed_qps=2.0, fixed_turns=4)


def spread(p50: float) -> dict[str, float]:
    return {"n": 9, "mean": p50, "p50": p50, "p90": 2 * p50, "p99": 3 * p50, "max": 4 * p50}


def grid_row(side: str, seed: int = 0, ttft: float = 50.0, **changes: Any) -> dict[str, Any]:
    told = {"ttft_ms": spread(ttft), "tpot_ms": spread(5.0), "itl_ms": None, "e2e_ms": None}
    row = {
        "part": "policy-grid", "grid": GRID.digest, "side": side, "shape": "1P1D", "qps": 2.0,
        "turns": 4, "seed": seed, "planned": 12, "success_rate": 1.0, "output_tokens_per_s": 300.0,
        "arrivals_s": 6.0, "timeout_s": 10.0, "sizes": [1024, 64, 32], "think_s": 0.3,
        "latencies": {"all": told, "later": told, "first": told},
        "samples": {"turn": [1, 2, 3, 4], "route": ["remote", "local", "local", "remote"]},
        "commit": "abc", "hardware": "2 cores", "at": "2026-11-21T20:00:00+00:00", "model": "tiny",
    }  # fmt: skip
    return row | changes


def test_the_cross_has_its_centre_once() -> None:
    points = list(GRID.points())
    assert points == [Point(1.0, 4), Point(2.0, 4), Point(2.0, 2), Point(2.0, 8)]


def test_all_sides_meet_the_same_plan_and_each_is_first_once() -> None:
    keys = list(order(GRID, [0, 1]))
    assert len(keys) == len(set(keys)) == len(SIDES) * len(list(GRID.points())) * 2
    firsts = [keys[at][0] for at in range(0, len(keys), len(SIDES))]
    assert len(set(firsts)) > len(SIDES) // 2
    assert [seed for _, _, seed in keys] == sorted(seed for _, _, seed in keys)
    one, again, other = (GRID.plan(Point(2.0, 4), seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert len(one) == 12
    assert {len(conversation.turns) for conversation in one} == {4}
    assert one[0].turns[0].new_tokens == GRID.first
    assert one[0].turns[1].new_tokens == GRID.new


def test_more_points_continue_a_file_and_other_sizes_do_not(tmp_path: Path) -> None:
    out = tmp_path / "grid.jsonl"
    assert measured(GRID, out) == set()
    rows = [grid_row("pd"), grid_row("ppd", seed=1)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut sho')
    found = {("pd", Point(2.0, 4), 0), ("ppd", Point(2.0, 4), 1)}
    assert measured(GRID, out) == found
    assert measured(Grid(qps=(9.0,)), out) == found
    assert measured(Grid(reply=64), out) == set()


@pytest.mark.parametrize("line", ["nonsense", '{"row": "turn"}', "[1]"])
def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    out = tmp_path / "grid.jsonl"
    out.write_text(json.dumps(grid_row("pd")) + f"\n{line}\n" + json.dumps(grid_row("full")) + "\n")
    with pytest.raises(ConfigError, match=r"grid\.jsonl:2: "):
        measured(GRID, out)


def test_a_rows_columns_keep_failures() -> None:
    fine = Sample(0, 1, 0.0, 0.1, 0, 10, 5, route="remote", ttft_ms=9.0)
    lost = Sample(0, 2, 0.0, 0.1, 15, 10, 5, error="lost")
    told = columns([fine, lost])
    assert told["prompt_tokens"] == [10, 25]
    assert {len(values) for values in told.values()} == {2}


def test_cells_are_by_seed_and_both_is_against_pd_with_the_same_seed() -> None:
    rows = [grid_row("pd", 0, ttft=100.0), grid_row("pd", 1, ttft=50.0)]
    rows += [grid_row("ppd", 0, ttft=50.0), grid_row("ppd", 1, ttft=50.0)]
    cells = {cell.side: cell for cell in summarize(rows)}
    ppd = cells["ppd"]
    assert ppd.values(TTFT) == [50.0, 50.0]
    assert ppd.values("ttft_p90_ms") == [100.0, 100.0]
    assert ppd.values(BOTH) == [0.75, 1.0]
    assert cells["pd"].values(BOTH) == [1.0, 1.0]
    assert ppd.middle("local_share") == pytest.approx(2 / 3)
    assert summarize([grid_row("ppd")])[0].values(BOTH) == []  # nothing to compare with
    assert "ppd" in as_text(list(cells.values()))


def test_who_is_not_beaten_with_every_seed_shares_the_win() -> None:
    rows = [grid_row("pd", seed, ttft=90.0) for seed in range(3)]
    rows += [grid_row("full", seed, ttft=ttft) for seed, ttft in enumerate((52.0, 48.0, 55.0))]
    rows += [grid_row("ppd", seed, ttft=50.0) for seed in range(3)]
    (won,) = winners(summarize(rows), TTFT)
    assert won.sides == ("ppd", "full")
    (tied,) = winners(summarize(rows), TPOT)
    assert set(tied.sides) == {"pd", "full", "ppd"}


def test_more_tokens_win_and_failures_cannot() -> None:
    rows = [grid_row("pd", output_tokens_per_s=300.0), grid_row("ppd", output_tokens_per_s=200.0)]
    assert winners(summarize(rows), THROUGHPUT)[0].sides == ("pd",)
    rows[0]["success_rate"] = 0.94
    assert winners(summarize(rows), THROUGHPUT)[0].sides == ("ppd",)
    rows[1]["success_rate"] = 0.0
    assert winners(summarize(rows), THROUGHPUT) == []


def test_a_point_where_nothing_succeeded_has_no_latency() -> None:
    none = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"))
    row = grid_row("pd", success_rate=0.0, latencies={"all": none, "later": none, "first": none})
    (cell,) = summarize([row])
    assert cell.failed
    assert cell.middle(TTFT) is None
