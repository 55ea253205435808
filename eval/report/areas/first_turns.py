"""First turns whose KV is sent while it is computed."""

from __future__ import annotations

from collections.abc import Callable

from ..parts import Block, Table, block, change, short
from ..results import Results, Row

_OWN_CHUNK = "8192"  # SGLang's
_TRACES = {"mooncake": "Mooncake", "miniswe": "agents", "taubench": "tau-bench"}  # by file


def pipelined(results: Results) -> Block:
    """Return what smaller chunks gain, and what layers gain beyond them, by link."""
    rows = results.rows("first-turns.jsonl")
    links = sorted(set(rows.values("link_gbps")))
    of = {(row["profile"], _prompts(row), row["link_gbps"]): row for row in rows}
    names = list(dict.fromkeys(rows.values("profile")))
    lines = sorted(
        dict.fromkeys((profile, prompts) for profile, prompts, _ in of),
        key=lambda line: names.index(line[0]),
    )
    table = [
        (f"`{profile}`", prompts, *(_cell(of[profile, prompts, link]) for link in links))
        for profile, prompts in lines
    ]
    caption = (
        "TTFT in ms with chunks of 8,192 tokens; its change by the best smaller chunks, with their "
        "size; its change by layers beyond these"
    )
    head = ("profile", "tokens of a prompt", *(f"{link:g} Gb/s" for link in links))
    return block(Table(head, table, caption), made_of=[rows])


def _prompts(row: Row) -> str:
    mean = f"{row['prompt_tokens']:,.0f}"
    if row["workload"] is None:
        return mean
    names = (name for file, name in _TRACES.items() if file in row["workload"])
    return f"{row['turns']:,} of {next(names, row['workload'])}, mean {mean}"


def _cell(row: Row) -> str:
    smaller = f"{change(1 - row['chunks_gain'])} ({row['best_chunk']:,})"
    if not row["chunks_gain"]:
        smaller = "-"
    return f"{short(row['chunks_ms'][_OWN_CHUNK])}, {smaller}, {change(1 - row['layers_gain'])}"


BLOCKS: dict[str, Callable[[Results], Block]] = {"first-turns": pipelined}
