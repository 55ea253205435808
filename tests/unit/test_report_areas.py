"""Tables of documents: which rows they take, how sides are paired, when they say tie."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.pool.queueing import Costs
from eval.pool.recall import qps_at
from eval.report.areas import bursts, emulation, faults, pool, routers
from eval.report.areas.traffic import _pauses
from eval.report.parts import change, short, spread
from eval.report.ratios import compared, paired
from eval.report.results import Results, Rows

ORIGIN = {"commit": "c0ffee123456", "hardware": "2 cores of it", "at": "2026-11-21T20:00:00+00:00"}
NEWER = {"commit": "fedcba987654", "hardware": "2 cores of it", "at": "2026-11-22T20:00:00+00:00"}


def rows(*made: dict[str, Any]) -> Rows:
    return Rows("results/some.jsonl", made, ())


def results(folder: Path, **files: list[dict[str, Any]]) -> Results:
    for name, of in files.items():
        file = folder / f"{name.replace('_', '-')}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in of))
    return Results(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "-"),
        ([2.0], "2"),
        ([3.0, 1.0, 2.0], "2 (1 to 3)"),
        ([1234.5, 999.7], "1,117 (1,000 to 1,234)"),
    ],
)
def test_a_median_has_its_lowest_and_highest(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_short_numbers() -> None:
    assert [short(value) for value in (None, 0.01234, 999.4, 999.6)] == [
        "-",
        "0.0123",
        "999",
        "1,000",
    ]
    assert change(0.65) == "-35 %"


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([], "-"),
        ([0.9], "0.90"),
        ([0.8, 1.25, 1.0], "1.00 [0.57, 1.74], tie"),
        ([0.5, 0.5, 0.5], "0.50 [0.50, 0.50]"),
    ],
)
def test_a_ratio_whose_interval_holds_1_is_a_tie(ratios: list[float], text: str) -> None:
    assert compared(ratios) == text


def test_sides_are_paired_by_what_they_have_in_common() -> None:
    one = rows({"round": 0, "ms": 2.0}, {"round": 1, "ms": 9.0}, {"round": 2, "ms": 1.0})
    other = rows({"round": 1, "ms": 3.0}, {"round": 0, "ms": 4.0})
    assert paired(one, other, "ms", "round") == [0.5, 3.0]


def router_row(router: str, number: int, us: float, **more: Any) -> dict[str, Any]:
    return {"router": router, "round": number, "cpu_us_per_request": us} | ORIGIN | more


def test_runs_end_where_a_round_comes_again_or_the_commit_changes() -> None:
    found = routers.runs_of(
        rows(
            router_row("ours", 0, 1.0),
            router_row("smg", 0, 1.0, commit="c0ffee123456+"),
            router_row("ours", 0, 1.0),
            router_row("ours", 1, 1.0),
            router_row("ours", 2, 1.0, **NEWER),
        )
    )
    assert [len(run) for run in found] == [2, 2, 1]


def test_routers_are_compared_by_round() -> None:
    whole = rows(
        router_row("ours", 0, 2.0),
        router_row("smg", 0, 4.0),
        router_row("smg", 1, 9.0),
    )
    sliced = rows(
        router_row("ours", 0, 2.5, slices={"cpu_us_per_request": [2.0, 3.0]}),
        router_row("smg", 0, 3.5, slices={"cpu_us_per_request": [1.0, 6.0]}),
    )
    found = routers.ratios([whole, sliced], "ours", "smg", "cpu_us_per_request")
    assert found == pytest.approx([0.5, 1.0]), "the geometric mean of a round's slices"


def test_the_newest_cell_of_each_router_stands_in_the_fault_table(tmp_path: Path) -> None:
    def cell(router: str, seen: str, **more: Any) -> dict[str, Any]:
        return {"fault": "it dies", "router": router, "seen": seen, "right": True} | ORIGIN | more

    others = [cell("smg", "nothing", right=False), cell("sglang_router", "x"), cell("mini_lb", "y")]
    made = faults.fault_table(
        results(
            tmp_path,
            fault_table=[cell("ours, remote", "old"), cell("ours, local", "old"), *others],
            fault_table_house=[
                cell("ours, remote", "one error", **NEWER),
                cell("ours, local", "no error", **NEWER),
            ],
        )
    )
    assert made.text.splitlines()[-1] == (
        "| it dies | remote: one error; local: no error | **nothing** | x | y |"
    )


def burst_rows(*ways: str) -> list[dict[str, Any]]:
    fixed: dict[str, Any] = {"what": "bursts", "load": 0.3, "capacity": 500.0, **ORIGIN}
    return [
        fixed | {"way": way, "stage": stage, "round": number, "p99_us": 1000.0 * (1 + place)}
        for place, way in enumerate(ways)
        for stage in ("prefill", "decode")
        for number in (0, 1)
    ]


def test_bursts_compare_ours_with_every_way_that_was_measured(tmp_path: Path) -> None:
    ways = ("ideal", "ours", "fifo", "prefill_first")
    cost = {"missed": 0.25, "scheduling_us": 40.0, "choosing_us": 9.0}
    rows = [row | (cost if row["way"] != "fifo" else {}) for row in burst_rows(*ways)]
    made = bursts.bursts(results(tmp_path, bench_pool=rows))
    fifo = "| 0.3 | prefill | one after the other | 3 | 0.67 [0.67, 0.67] | - | - | - |"
    first = "| 0.3 | decode | prefill first | 4 | 0.50 [0.50, 0.50] | 25.0% | 40 | 9 |"
    ideal = "| 0.3 | decode | queueing alone | 1 | 2.00 [2.00, 2.00] | 25.0% | - | 9 |"
    for line in (fifo, first, ideal):
        assert line in made.text


def test_simulated_bursts_have_one_row_for_each_load_and_way(tmp_path: Path) -> None:
    rows = [
        {
            "load": load,
            "way": way,
            "python_share": python,
            "seed": seed,
            "scheduling_us": 40.0 * python,
            "wider": wider,
        }
        | {"prefill_p99_us": p99 * (1 + python), "decode_p99_us": 2 * p99 * (1 + python)}
        | {"prefill_missed": 0.0, "decode_missed": 0.1, **asdict(Costs()), **ORIGIN}
        for load in (0.2, 0.3, 0.7)
        for way, p99 in (("prefill_first", 250.0), ("ours", 500.0))
        for wider in ((1, 2) if load == 0.3 else (1,))
        for python in (1.0, 0.0)
        for seed in (0, 1)
    ]
    made = results(tmp_path, pool_queueing=rows)
    lines = bursts.queueing(made).text.splitlines()
    assert "| 0.3 | ours | 1 | 2 | 1 | 1 | 0.0% | 10.0% | 40 |" in lines
    ratios = "2.00 [2.00, 2.00] | 2.00 [2.00, 2.00]"
    assert f"| 0.7 | prefill first | 0.5 | 1 | {ratios} | 0.0% | 10.0% | 40 |" in lines
    assert "| ours | 1 / 2 | 1 / 2 | 1 / 2 |" in bursts.loads(made).text
    assert "| Python: a whole search | 40 |" in bursts.costs(made).text
    assert "| 0.3 | prefill first | 0.5 | 0.25 | 1 | 0.5 |" in bursts.python(made).text
    assert f"| 512 | prefill first | 0.5 | 1 | {ratios} |" in bursts.wide(made).text


def test_a_rate_at_a_recall_lies_between_two_widths() -> None:
    assert qps_at([(0.9, 400.0), (1.0, 100.0)], 0.95) == 200.0
    assert qps_at([(0.97, 400.0), (0.99, 100.0)], 0.95) == 400.0
    assert qps_at([(0.5, 400.0), (0.8, 100.0)], 0.95) is None


def test_an_index_that_misses_the_recall_has_no_rate(tmp_path: Path) -> None:
    def point(index: str, width: int, recall: float, number: int) -> dict[str, Any]:
        place = {"what": "curve", "set": "small", "n": 9, "threads": 1, "round": number}
        return place | {"index": index, "width": width, "recall": recall, "qps": 1e3} | ORIGIN

    measured = {"ours": (0.9, 0.99), "ours_fp32": (0.9, 0.98), "hnswlib": (0.9, 0.98)}
    curves = [
        point(index, width, recall, number)
        for index, recalls in (measured | {"usearch": (0.5,)}).items()
        for width, recall in enumerate(recalls, 10)
        for number in (0, 1)
    ]
    built: list[dict[str, Any]] = [
        {**ORIGIN, "what": "build", "set": "small", "index": index, "seconds": 2.0}
        for index in (*measured, "usearch")
    ]
    single: dict[str, Any] = {
        "what": "single",
        "set": "small",
        "index": "ours",
        "p50_us": 9.0,
        "p99_us": 19.0,
    }
    made = pool.small(results(tmp_path, bench_pool=[*curves, *built, {**ORIGIN, **single}]))
    missed = " | ".join(["recall 0.50 at most"] * 3)
    assert f"| usearch, f32 | {missed} | - | - | 2 |" in made.text
    assert "| hnswlib | 1,000 | 1,000 | 1,000 | 1.00 [1.00, 1.00], tie | - | 2 |" in made.text
    assert "| ours, int8 and fp32 | 1,000 | 1,000 | 1,000 | - | 9 / 19 | 2 |" in made.text


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ("sessions:{chat}?faster=120&max_context=40000", "the trace's / 120"),
        ("tau-bench:{airline}?think_s=0.5", "drawn, mean 0.5 s"),
        ("azure:{chat}", "the trace's"),
    ],
)
def test_pauses_say_how_they_were_scaled(workload: str, text: str) -> None:
    assert _pauses(workload) == text


def test_a_cell_of_the_emulation_is_its_median_against_its_prediction(tmp_path: Path) -> None:
    prediction: dict[str, Any] = {
        "row": "prediction",
        "cell": "local 2k alone",
        "predicted_ms": 10.0,
        **ORIGIN,
    }
    prediction |= {"kv_bytes": 2_500_000, "route": "local", "slow_motion": 40.0}
    turn: dict[str, Any] = {
        "row": "turn",
        "cell": "local 2k alone",
        "profile": "p",
        "calibration": "device",
    }
    turn |= {"cached_tokens": 2048, "bubble_share": 0.001, **ORIGIN}
    turns = [{**turn, "repeat": i, "measured_ms": ms} for i, ms in enumerate((10.1, 9.0, 10.4))]
    text = emulation.check(results(tmp_path, emulation_check=[prediction, *turns])).text
    cells = "10.0 | 10.1 | +1.0 % | 9.0 to 10.4 | 2,048 | 2.5 | local | 40"
    assert f"| local 2k alone | {cells} |" in text
    assert "Medians of 3 repeats" in text.replace("TTFT in ms, m", "M")


def test_profiles_need_no_rows(tmp_path: Path) -> None:
    block = emulation.profiles(Results(tmp_path))
    assert "`llama-3.1-8b-h100-tp1`" in block.text
    assert not block.made_of
