"""The router bench: the baseline's place in a run, and paired ratios."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from eval.routers.bench import in_round
from eval.routers.candidates import with_baselines
from eval.routers.summary import geometric_interval, paired, paired_ratios
from ppd.errors import ConfigError


def row(router: str, number: int, **costs: object) -> dict[str, object]:
    return {"router": router, "round": number, **costs}


def test_slices_of_a_round_count_as_one_ratio() -> None:
    request, burst = "cpu_us_per_request", "cpu_us_per_chunk_burst"
    rows = [
        row("ours", 0, slices={request: [100.0, 120.0], burst: [2.0]}),
        row("baseline", 0, slices={request: [200.0, 100.0], burst: [2.0]}),
        row("baseline", 1, slices={request: [100.0, 100.0], burst: [4.0]}),
        row("ours", 1, slices={request: [100.0, 90.0], burst: [4.0]}),
    ]
    compared = paired_ratios(rows, "ours", "baseline")
    assert set(compared) == {request, burst}
    assert compared[request]["rounds"] == 2
    by_round = math.sqrt(0.5 * 1.2), math.sqrt(1.0 * 0.9)
    assert compared[request]["median"] == pytest.approx(sum(by_round) / 2, abs=1e-4)
    assert compared[burst]["interval"] == [1.0, 1.0]
    assert paired(rows) == {"ours/baseline": compared}
    assert paired(rows[:1]) == {}
    named = {"ours": "ours_everything", "baseline": "ours"}
    renamed = [{**row, "router": named[str(row["router"])]} for row in rows]
    assert paired(renamed) == {"ours_everything/ours": compared}


def test_rows_without_slices_are_paired_by_round() -> None:
    rows = [
        row("ours", 0, cpu_us_per_request=100.0),
        row("baseline", 0, cpu_us_per_request=200.0),
    ]
    compared = paired_ratios(rows, "ours", "baseline")["cpu_us_per_request"]
    assert compared == {"rounds": 1, "median": 0.5, "interval": None}


def test_interval_is_students_over_logarithms() -> None:
    low, high = geometric_interval([0.9, 1.0, 1.1]) or (0.0, 0.0)
    mean = math.log(0.9 * 1.1) / 3
    logs = [math.log(ratio) - mean for ratio in (0.9, 1.0, 1.1)]
    margin = 4.303 * math.sqrt(sum(x * x for x in logs) / 2 / 3)
    assert (low, high) == pytest.approx((math.exp(mean - margin), math.exp(mean + margin)))
    assert geometric_interval([0.9]) is None


def test_interval_of_many_rounds_nears_the_normal_one() -> None:
    ratios = [1.0, 1.1] * 15
    low, high = geometric_interval(ratios) or (0.0, 0.0)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 30
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 29 / 30)
    assert math.log(high / low) / 2 / deviation == pytest.approx(2.0452, abs=0.001)  # 29 degrees


def test_each_router_goes_first_as_often_as_its_baseline() -> None:
    order: list[str] = ["ours", "baseline"]
    rounds = [in_round(order, number) for number in range(4)]
    assert [names[0] for names in rounds].count("ours") == 2
    three = [in_round(["ours", "baseline", "floor"], number) for number in range(6)]
    assert sum(names.index("ours") < names.index("baseline") for names in three) == 3


def test_baseline_stands_beside_each_router_of_ours(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router/cli.py").touch()
    names = with_baselines(["floor", "ours", "ours_compiled"], tmp_path)
    assert names == ["floor", "ours", "baseline", "ours_compiled", "baseline_compiled"]
    with pytest.raises(ConfigError, match="is compared with one of ours, ours_compiled"):
        with_baselines(["floor"], tmp_path)
    with pytest.raises(ConfigError, match="is no checkout of this project"):
        with_baselines(["ours"], tmp_path / "router")
