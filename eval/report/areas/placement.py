"""Where new conversations go: by load and shared prefixes, against a hash."""

from __future__ import annotations

from collections.abc import Callable

from ..parts import Block, Table, block, percent, short
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
        "worker against the mean"
    )
    return block(
        Table((*head, "busiest", "KV moved a turn, tokens"), table, caption), made_of=[rows]
    )


BLOCKS: dict[str, Callable[[Results], Block]] = {"placement-simulated": simulated}
