"""Where new conversations go: by load and shared prefixes, against a hash."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from ..parts import PAPER_MACHINE, Block, Table, block, percent, short
from ..results import Results

_RULES = {"router-hash": "`hash`", "router-load": "`load`"}


def simulated(results: Results) -> Block:
    """Return both rules in the simulator, with shared system prompts and without."""
    rows = results.rows("placement.jsonl").newest()
    table = [
        (
            f"{row['shared_tokens']:,}",
            _RULES[row["rule"]],
            percent(row["cached_share"]),
            f"{short(row['t1_ttft_p50_ms'])} / {short(row['t1_ttft_p99_ms'])}",
            f"{row['prefill_balance']:.2f}, {row['decode_balance']:.2f}",
            f"{row['moved_tokens_per_turn']:,.0f}",
        )
        for row in rows
    ]
    head = ("system prompt, tokens", "rule", "cached, first turns", "their TTFT p50 / p99, ms")
    row = rows.rows[0]
    caption = (
        f"`{row['shape']}`, {row['qps']:g} conversations a second; the busiest prefill and decode "
        f"worker against the mean; {PAPER_MACHINE}"
    )
    return block(
        Table((*head, "busiest", "KV moved a turn, tokens"), table, caption), made_of=[rows]
    )


def emulated(results: Results) -> Block:
    """Return both rules on emulated workers, beside the simulator on the same inputs."""
    rows = results.rows("placement-emulated.jsonl").where(row="run")
    table = [
        (
            "8k" if "shared=" in row["workload"] else "none",
            f"{row['seed']}",
            f"`{row['placement']}`",
            percent(row["t1_cached_share"]),
            f"{short(row['t1_ttft_p50_ms'])} / {short(row['t1_ttft_p99_ms'])}",
            f"{_busiest(row, 'p'):.2f}, {_busiest(row, 'd'):.2f}",
        )
        for row in rows
    ]
    row = rows.rows[0]
    caption = (
        f"`{row['shape']}`, `{row['profile']}`, {row['qps']:g} conversations a second, slow motion "
        f"{row['slow_motion']:g}; the busiest prefill and decode worker against the mean"
    )
    head = ("system prompt", "seed", "rule", "cached, first turns", "their TTFT p50 / p99, ms")
    return block(Table((*head, "busiest"), table, caption), made_of=[rows])


def _busiest(row: Mapping[str, Any], kind: str) -> float:
    """The busiest device of a kind, divided by the mean."""
    busy_ms = [ms for worker, ms in row["busy_ms_of"].items() if worker.startswith(kind)]
    return float(max(busy_ms) / statistics.mean(busy_ms))


BLOCKS: dict[str, Callable[[Results], Block]] = {
    "placement-simulated": simulated,
    "placement-emulated": emulated,
}
