"""Speculative decoding: what an append costs running decodes that speculate."""

from __future__ import annotations

from collections.abc import Callable

from ..parts import Block, Table, block, spread
from ..ratios import HOW, compared, paired
from ..results import Results

_FILE = "bench-speculation.jsonl"
_NAMES = {
    "alternating": "local, between steps",
    "chosen": "local, the cheaper kind",
    "delta": "delta",
}


def appends(results: Results) -> Block:
    """Return TTFT of an append and TPOT of the decodes beside it, by way."""
    rows = results.rows(_FILE).newest()
    table = []
    for cell in sorted(rows.groups("decodes", "context", "new")):
        decodes, context, new = cell
        of_cell = rows.where(decodes=decodes, context=context, new=new)
        delta = of_cell.where(way="delta")
        for way, name in _NAMES.items():
            of = of_cell.where(way=way)
            beside = [row["tpot_ms"] / row["quiet_tpot_ms"] for row in of]
            against = "" if way == "delta" else compared(paired(of, delta, "ttft_ms", "round"))
            table.append(
                (
                    *(f"{decodes}", f"{context:,}", f"{new:,}", name),
                    *(spread(of.values("ttft_ms")), against, spread(of.values("quiet_tpot_ms"))),
                    *(spread(beside), spread(of.values("tokens_per_event"))),
                )
            )
    head = ("decodes", "context", "new", "append", "TTFT, ms", "/ delta", "TPOT before, ms")
    rounds = len(set(rows.values("round")))
    caption = (
        f"medians of {rounds} rounds (lowest to highest); TPOT is the time of a token that a "
        f"client gets; meanwhile: until the append's first token; ratios by round: {HOW}"
    )
    return block(
        Table((*head, "TPOT meanwhile / before", "tokens a step"), table, caption), made_of=[rows]
    )


BLOCKS: dict[str, Callable[[Results], Block]] = {"speculation": appends}
