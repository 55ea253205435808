"""The summary of ``bench cores``."""

from __future__ import annotations

from eval.bench_cores import CoresTurn, summarize


def test_first_and_later_turns_are_apart() -> None:
    turns = [
        CoresTurn("divided", 1, at_once, 0, 0, turn, "remote", 50, 24, 0, ttft_ms)
        for at_once, times in ((1, (100.0, 10.0, 20.0, 30.0)), (5, (400.0, 50.0, 40.0, 90.0)))
        for turn, ttft_ms in enumerate(times, 1)
    ]
    assert summarize(turns) == [
        {
            "way": "divided", "threads": 1, "conversations": 1,
            "first_ttft_ms": 100.0, "first_ttft_range_ms": [100.0, 100.0],
            "later_ttft_ms": 20.0, "later_ttft_range_ms": [10.0, 30.0],
        },
        {
            "way": "divided", "threads": 1, "conversations": 5,
            "first_ttft_ms": 400.0, "first_ttft_range_ms": [400.0, 400.0],
            "later_ttft_ms": 50.0, "later_ttft_range_ms": [40.0, 90.0],
        },
    ]  # fmt: skip
