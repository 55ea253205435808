"""What the engine's benchmarks make of what they saw."""

from __future__ import annotations

from eval.engine.bench import Row, summarize
from eval.engine.client import Reply, gaps_ms
from eval.engine.interference import summarize as summarize_interference
from eval.engine.loaded import summarize_load
from eval.engine.ranks import Hooks, Peers, Prefill
from eval.engine.ranks import summarize as summarize_ranks


def row(way: str, ttft_ms: float, **fields: float) -> Row:
    known = {"bg_tpot_ms": 15.0, "reply_tpot_ms": 11.0, "quiet_tpot_ms": 10.0, "max_gap_ms": 30.0}
    told = known | fields
    return Row(0, 1024, 64, 6, True, way, ttft_ms, 1000, decode_step_ms=9.0, **told)


def test_gaps_are_those_that_touch_the_interval() -> None:
    reply = Reply(0.0, arrived_s=[1.0, 1.1, 1.3, 1.6, 2.0])
    assert [round(gap) for gap in gaps_ms(reply, 1.15, 1.5)] == [200, 300]
    assert [round(gap) for gap in gaps_ms(reply, 1.32, 1.33)] == [300]
    assert gaps_ms(reply, 2.5, 3.0) == []


def test_a_cell_holds_medians_of_each_way() -> None:
    rows = [row("full", 30.0), row("delta", 20.0), row("local", 10.0)]
    rows += [row("local", 14.0, bg_tpot_ms=30.0), row("local", 90.0, bg_tpot_ms=20.0)]
    (cell,) = summarize(rows)
    assert (cell["context"], cell["new"], cell["background"], cell["bounded"]) == (
        1024,
        64,
        6,
        True,
    )
    assert [cell[f"{way}_ttft_ms"] for way in ("full", "delta", "local")] == [30.0, 20.0, 14.0]
    assert (cell["delta_bg_tpot_ratio"], cell["local_bg_tpot_ratio"]) == (1.5, 2.0)
    assert cell["local_reply_tpot_ratio"] == 1.1
    assert (cell["max_decode_gap_ms"], cell["tpot_target_ms"]) == (30.0, 15.0)


def test_the_loaded_part_counts_later_turns_and_failures() -> None:
    def turn(
        rate: float, way: str, number: int, ttft_ms: float, error: str = ""
    ) -> dict[str, object]:
        told = {"ttft_ms": ttft_ms, "tpot_ms": 5.0, "error": error, "turn": number}
        return {"qps": rate, "way": way, **told}

    rows = [
        turn(rate, way, number, 10.0 * number)
        for rate in (0.5, 1.0, 1.3)
        for way in ("delta", "local")
        for number in range(1, 12)
    ]
    rows.append(turn(0.5, "local", 2, 0.0, error="500"))
    told = list(summarize_load(rows))
    assert [cell["qps"] for cell in told] == [0.5, 1.0, 1.3]
    assert (told[0]["local_p50_ms"], told[0]["local_failed"], told[1]["local_failed"]) == (
        65.0,
        1,
        0,
    )
    assert 105.0 <= told[0]["delta_p90_ms"] <= 110.0


def test_interference_is_a_ratio_to_decoding_alone() -> None:
    arms = (("none", 0, 5.0), ("full", 1, 50.0), ("append", 1, 10.0), ("full", 1, 70.0))
    rows = [
        {
            "context": 2048,
            "batch": 4,
            "prefills": n,
            "kind": kind,
            "tpot_ms": t,
            "longest_gap_ms": t,
        }
        for kind, n, t in arms
    ]
    cells = {cell["kind"]: cell["tpot_ratio"] for cell in summarize_interference(rows)}
    assert cells == {"none": 1.0, "full": 12.0, "append": 2.0}


def test_ranks_are_compared_by_round() -> None:
    rows: list[Peers | Hooks | Prefill] = []
    for number, slow in enumerate((1.0, 2.0, 4.0)):  # a machine that becomes slower
        rows += [
            Peers(number, 1024, 256, way, 100.0, 10 * slow, ratio * 10 * slow)
            for way, ratio in (("own rank", 1.5), ("peer", 1.25))
        ]
        rows += [Hooks(number, way, slow * ms) for way, ms in (("plugin", 10.2), ("stock", 10.0))]
        rows += [
            Prefill(number, way, 1000, found)
            for way, found in (("by chance", 500), ("of one rank", 1000))
        ]
    told = summarize_ranks(rows)
    assert [(cell["way"], cell["ratio"]) for cell in told["peers"]] == [
        ("own rank", 1.5),
        ("peer", 1.25),
    ]
    assert told["hooks_ratio"] == 1.02
    assert told["prefix_found"] == {"by chance": 0.5, "of one rank": 1.0}
