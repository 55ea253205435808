"""``ppd-eval table diff``: what changed from one table to another.

Every cell of the new table is looked up in the old one at the point where it was measured, so
that their grids may differ.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median

from ppd.score import Weights, score
from ppd.table import Cell, Table

from .reading import read

_SHOWN = 1.1  # a change of a cost by less is noise


def run(old: Path, new: Path, weights: Weights) -> int:
    """Print changed cells, and one JSON line; 1 if a decision changed.

    Raises:
        TableError: one is no table, or has no throughput to weigh.
    """
    before, after = (read(path, weights) for path in (old, new))
    for name in ("model", "shape"):
        was, now = (getattr(table.record, name) for table in (before, after))
        if was != now:
            print(f"{name}: {was} before, {now} now")
    flipped = beyond = 0
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for cell, was_cell in zip(after.cells, _at_points(before, after), strict=True):
        if was_cell is None:
            beyond += 1
            print(f"        new  {cell.label}")
            continue
        was = score(weights, was_cell.remote, was_cell.local)
        now = score(weights, cell.remote, cell.local)
        changes = _ratios(was_cell, cell)
        for name, ratio in changes.items():
            ratios[name].append(ratio)
        turned = was.prefers_local is not now.prefers_local
        flipped += turned
        if turned or any(abs(math.log(ratio)) > math.log(_SHOWN) for ratio in changes.values()):
            changed_costs = ", ".join(f"{name} x{ratio:.2f}" for name, ratio in changes.items())
            route = "local" if now.prefers_local else "remote"
            mark = f"now {route}" if turned else ""
            print(
                f"{mark:>11}  {cell.label}: score {was.local:+.2f} > {now.local:+.2f}; "
                f"{changed_costs}"
            )
    summary = {
        "cells": len(after.cells),
        "flipped": flipped,
        "not_in_old": beyond,
        **{f"{name}_ratio": round(median(values), 3) for name, values in ratios.items()},
    }
    print(json.dumps(summary))
    return 1 if flipped else 0


def _at_points(before: Table, after: Table) -> list[Cell | None]:
    """The old cell at each new cell's point."""
    a = after.record.axes
    return [
        before.find(context.at, new.at, output.at, qps.at)
        for context in a.context_tokens
        for new in a.new_tokens
        for output in a.output_tokens
        for qps in a.qps
    ]


def _ratios(was: Cell, now: Cell) -> dict[str, float]:
    ratios = {
        "remote_ttft": now.remote.ttft_ms / was.remote.ttft_ms,
        "local_ttft": now.local.ttft_ms / was.local.ttft_ms,
        "remote_tpot": now.remote.tpot_ms / was.remote.tpot_ms,
        "local_tpot": now.local.tpot_ms / was.local.tpot_ms,
    }
    if was.remote.tokens_per_s and now.remote.tokens_per_s:
        ratios["remote_throughput"] = now.remote.tokens_per_s / was.remote.tokens_per_s
        ratios["local_throughput"] = now.local.tokens_per_s / was.local.tokens_per_s
    return ratios
