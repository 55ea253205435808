"""Ranks of data parallelism: decodes beside another rank's append, the plugin's cost, prefixes."""

from __future__ import annotations

from collections.abc import Callable

from ..parts import Block, Table, block, percent, spread
from ..ratios import HOW, compared, paired
from ..results import Results, Rows

_FILE = "bench-ranks.jsonl"


def _part(results: Results, part: str) -> Rows:
    return results.rows(_FILE).where(part=part).newest()


def peers(results: Results) -> Block:
    """Return TPOT of one rank's decodes beside an append, by the append's rank."""
    rows = _part(results, "peers")
    table = []
    for context, new, way in sorted(rows.groups("context", "new", "way")):
        of = rows.where(context=context, new=new, way=way)
        ratios = [row["tpot_ms"] / row["quiet_tpot_ms"] for row in of]
        sizes = f"{context:,}", f"{new:,}"
        times = spread(of.values("ttft_ms")), spread(of.values("quiet_tpot_ms"))
        table.append((*sizes, way, *times, spread(ratios)))
    head = (
        "context",
        "new",
        "append on",
        "its TTFT, ms",
        "TPOT before, ms",
        "TPOT beside / before",
    )
    rounds = len(set(rows.values("round")))
    caption = f"decodes of one of two ranks; medians of {rounds} rounds (lowest to highest)"
    return block(Table(head, table, caption), made_of=[rows])


def hooks(results: Results) -> Block:
    """Return TPOT of remote turns with the plugin and without it."""
    rows = _part(results, "hooks")
    plugin, stock = (rows.where(way=way) for way in ("plugin", "stock"))
    line = (
        *(spread(of.values("tpot_ms")) for of in (plugin, stock)),
        compared(paired(plugin, stock, "tpot_ms", "round")),
    )
    head = ("TPOT with the plugin, ms", "SGLang with its radix cache, ms", "ratio")
    rounds = len(set(rows.values("round")))
    caption = f"medians of {rounds} rounds (lowest to highest); ratio by round: {HOW}"
    return block(Table(head, [line], caption), made_of=[rows])


def prefill(results: Results) -> Block:
    """Return the share of a conversation's prefix that a prefill server's ranks find."""
    rows = _part(results, "prefill")
    table = []
    for (way,), of in rows.groups("way").items():
        found = sum(row["cached_tokens"] for row in of) / sum(row["prefix_tokens"] for row in of)
        table.append((way, f"{sum(row['prefix_tokens'] for row in of):,}", percent(found)))
    head = ("bootstrap rooms", "tokens that an earlier turn has prefilled", "of these found")
    return block(Table(head, table), made_of=[rows])


BLOCKS: dict[str, Callable[[Results], Block]] = {
    "ranks-peers": peers,
    "ranks-hooks": hooks,
    "ranks-prefill": prefill,
}
