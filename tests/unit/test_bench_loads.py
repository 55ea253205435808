"""What the router bench makes of a load: costs, pace, latencies and fairness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from eval.http_stream import Reply
from eval.routers.load import LOADS, Load, Window, gaps_of, latencies, one_core
from eval.routers.probe import stream_costs
from eval.routers.stages import shares_of

PACED = Load("paced", streams=2, chunks=100, interval_s=0.1)


def window(**changes: Any) -> Window:
    usual = Window(chunks=40, reads=10, wall_s=4.0, cpu_s=0.002, mb=100.0, shares=(), slip_s=None)
    return replace(usual, **changes)


def test_a_paced_load_is_compared_with_its_pace() -> None:
    costs = window().costs(PACED)
    assert costs["cpu_us_per_chunk"] == pytest.approx(50)
    assert costs["pace"] == pytest.approx(0.5)  # 10 chunks a second instead of 20
    assert costs["reads_per_chunk"] == 0.25
    assert costs["core_use"] == pytest.approx(0.0005)
    assert "chunks_per_s" not in costs


def test_a_load_without_a_pace_has_a_rate() -> None:
    costs = window(slip_s=0.002).costs(Load("saturated", 2, 100, 0.0))
    assert costs["chunks_per_s"] == pytest.approx(10)
    assert costs["slip_p99_ms"] == pytest.approx(2)
    assert "pace" not in costs


@pytest.mark.parametrize(
    ("shares", "fairness"), [((0.5, 0.5), 1.0), ((0.9, 0.1), 0.2), ((0.25,) * 4, 1.0)]
)
def test_fairness_is_the_smallest_share_of_an_equal_one(
    shares: tuple[float, ...], fairness: float
) -> None:
    assert window(shares=shares).costs(PACED)["fairness"] == pytest.approx(fairness)


def test_chunks_of_one_read_have_no_time_between_them() -> None:
    assert gaps_of([1.0, 1.0, 3.0]) == [0.0, 2.0]
    replies = [Reply(sent_s=0.0, first_s=0.5, stamps=[0.5, 0.5, 1.5]) for _ in range(2)]
    found = latencies(replies)
    assert found["ttft_p50_ms"] == pytest.approx(500)
    assert found["itl_p50_ms"] == pytest.approx(500)  # between gaps of 0 and 1,000 ms
    assert found["itl_p99_ms"] == pytest.approx(1000)


def test_figures_carry_the_name_of_their_load() -> None:
    reply = Reply(sent_s=0.0, first_s=0.5, stamps=[0.5, 0.6])
    found = stream_costs(PACED, window(), [reply])
    assert found["pace_paced"] == pytest.approx(0.5)
    assert found["ttft_p99_ms_paced"] == pytest.approx(500)


def test_what_one_core_carries_follows_from_the_cost_of_each() -> None:
    assert one_core({"cpu_us_per_chunk_saturated": 8.0}) == {"chunks_per_s_one_core": 125_000}
    assert one_core({"cpu_us_per_request": 100.0}) == {"requests_per_s_one_core": 10_000}


def test_only_the_saturated_load_has_no_pace() -> None:
    assert [load.name for load in LOADS if load.wanted_per_s is None] == ["saturated"]


def test_stages_are_shares_of_the_time_outside_of_the_event_loop() -> None:
    class Stats:
        stats: ClassVar[dict[tuple[str, int, str], tuple[int, int, float, float, object]]] = {
            ("/lib/asyncio/runners.py", 1, "run"): (1, 1, 6.0, 12.0, {}),
            ("/x/router/server/run.py", 1, "serve"): (1, 1, 0.1, 2.0, {}),
            ("/x/router/serving/handler.py", 1, "_plan"): (9, 9, 0.2, 1.0, {}),
            ("/x/router/serving/sending.py", 1, "send"): (9, 9, 0.2, 2.0, {}),
        }

    found = shares_of(Stats())
    assert found["decide, name the workers"] == 0.25  # of 12 - 6 - 2 seconds
    assert found["send it to workers"] == 0.5
    assert found["record it"] == 0.0
