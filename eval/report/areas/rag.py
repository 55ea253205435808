"""Passages in chats: where they are placed, and what searches beside a stream cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...summary import percentile
from ..parts import Block, Table, block, spread
from ..results import Results, Rows

_PLACES = {
    "off": "off",
    "tail": "tail, kept",
    "stripped": "last message, stripped later",
    "system": "system prompt",
}
_TURNS = (2, 5, 10)
_QUEUES = {"stages": "the pool's stages", "single_queue": "one queue for all"}


def turns(results: Results) -> Block:
    """Return what stays cached, and TTFT, by the place of the passages."""
    rows = results.rows("bench-rag.jsonl").where(part="rag").newest()
    places = list(dict.fromkeys(rows.values("way")))
    table = []
    for number in _TURNS:
        cells = [f"{number}"]
        for place in places:
            of = rows.where(way=place, turn=number)
            cached, context = (
                round(statistics.median(of.values(key)))
                for key in ("cached_tokens", "context_tokens")
            )
            cells += [f"{cached:,} of {context:,}", spread(of.values("ttft_ms"))]
        table.append(tuple(cells))
    head = ["turn"]
    for place in places:
        head += [f"{_PLACES.get(place, place)}: cached of context", "TTFT, ms"]
    rounds = len(set(rows.values("round")))
    caption = f"medians of {rounds} rounds (lowest to highest); the search is part of TTFT"
    return block(Table(tuple(head), table, caption), made_of=[rows])


def load(results: Results) -> Block:
    """Return searches before a prefill and the stalls of streams, with stages and without."""
    long, short = (results.rows(name) for name in ("rag-load.jsonl", "rag-load-64.jsonl"))
    table = []
    for rows, replies in ((long, "long"), (short, "short")):
        for (commit,), of in rows.groups("commit").items():
            for (way,), runs in of.groups("way").items():
                table.append((replies, commit[:7], _QUEUES[way], *_load(runs)))
    head = ("replies", "commit", "pool", "search p50 / p95, ms", "late", "streams stalled")
    caption = (
        "long: replies of 256 tokens, a search every 64; short: replies of 64 tokens, a search "
        "every 16; stalled: share of decoding time, by run (lowest to highest)"
    )
    return block(Table(head, table, caption), made_of=[long, short])


def _load(runs: Rows) -> Sequence[str]:
    searched = sorted(ms for row in runs for ms in row["searched_ms"])
    late, turns = sum(runs.values("late")), sum(runs.values("turns"))
    stalled = [100 * row["stalled_s"] / row["decoding_s"] for row in runs]
    return (
        f"{statistics.median(searched):.0f} / {percentile(searched, 0.95):.0f}",
        f"{late} of {turns}",
        f"{spread(stalled)} %",
    )


BLOCKS = {"rag-turns": turns, "rag-load": load}
