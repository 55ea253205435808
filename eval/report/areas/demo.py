"""The demo: each turn in three ways, as the engine reports it."""

from __future__ import annotations

from ..parts import Block, Table, block
from ..results import Results

_HEAD = (
    "turn",
    "context",
    "new",
    "cached",
    "local",
    "remote, delta transfer",
    "remote, full transfer",
)
WAYS = ("ttft_ms", "delta_ttft_ms", "full_ttft_ms")


def turns(results: Results) -> Block:
    """Return the turns of the newest run with the real model."""
    rows = (
        results.rows("demo.jsonl").pick(lambda row: WAYS[1] in row, "a run in three ways").newest()
    )
    row = rows.rows[-1]
    counts = zip(row["context_tokens"], row["new_tokens"], row["cached_tokens"], strict=True)
    lines = [
        (f"{number}", *(f"{count:,}" for count in tokens), *(f"{one:,.0f}" for one in times))
        for number, (tokens, times) in enumerate(
            zip(counts, zip(*(row[way] for way in WAYS), strict=True), strict=True), 1
        )
    ]
    same = "are" if row["identical_to_monolithic"] else "are NOT"
    caption = (
        f"TTFT of each turn in ms; `{row['model']}`; context, new and cached are tokens; "
        f"the token ids of the local turns {same} those of one monolithic server"
    )
    return block(Table(_HEAD, lines, caption), made_of=[rows])


BLOCKS = {"demo": turns}
