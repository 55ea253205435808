"""The demo: five turns of a chat, as the engine reports them."""

from __future__ import annotations

from ..parts import Block
from ..results import Results

_HEAD = ("turn", "route", "context", "new", "cached", "TTFT ms")
_LINE = "{:>4}  {:<7} {:>7} {:>6} {:>7} {:>9}"


def turns(results: Results) -> Block:
    """Return the newest run, as ``make demo`` prints it, without reasons: rows hold none."""
    rows = results.rows("demo.jsonl").newest()
    row = rows.rows[-1]
    columns = ("routes", "context_tokens", "new_tokens", "cached_tokens", "ttft_ms")
    lines = [_LINE.format(*_HEAD)]
    for number, line in enumerate(zip(*(row[column] for column in columns), strict=True), 1):
        *counts, ttft_ms = line
        lines.append(_LINE.format(number, *counts, f"{ttft_ms:.1f}"))
    same = "yes" if row["identical_to_monolithic"] else "NO"
    lines += ["", f"token ids identical to the monolithic server's: {same}"]
    return Block("\n".join(("```", *lines, "```")), (rows,))


BLOCKS = {"demo": turns}
