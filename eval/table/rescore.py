"""``ppd-eval table score``: what other wishes would choose, from the same measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ppd.score import Objective, Targets, Weights, score
from ppd.table import Table

_STEPS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def run(path: Path, objectives: Sequence[Objective]) -> int:
    """Print the share of local cells for each objective (default: from TPOT alone to TTFT alone),
    what they cost, and one JSON line.

    Raises:
        TableError: it is no table.
    """
    table = Table.parse(path.read_bytes())
    wanted = objectives or [Weights(step, 1.0 - step) for step in _STEPS]
    print(f"{'wish':<28} {'local':>6} {'TTFT to remote':>15} {'TPOT to remote':>15}")
    rows = []
    for objective in wanted:
        results = [(cell, score(objective, cell.remote, cell.local)) for cell in table.cells]
        chosen = [(c.local if r.prefers_local else c.remote, c.remote) for c, r in results]
        row = {
            "objective": _name(objective),
            "local_cells": sum(result.prefers_local for _, result in results),
            "cells": len(results),
            "ttft_ratio": _mean([one.ttft_ms / remote.ttft_ms for one, remote in chosen]),
            "tpot_ratio": _mean([one.tpot_ms / remote.tpot_ms for one, remote in chosen]),
        }
        rows.append(row)
        share = sum(result.prefers_local for _, result in results) / len(results)
        print(
            f"{_name(objective):<28} {share:>6.0%} {row['ttft_ratio']:>15} {row['tpot_ratio']:>15}"
        )
    print(json.dumps({"table": str(path), "scores": rows}))
    return 0


def _name(objective: Objective) -> str:
    match objective:
        case Weights():
            return f"TTFT {objective.ttft:g}, TPOT {objective.tpot:g}"
        case Targets():
            named = (("TTFT", objective.ttft_ms), ("TPOT", objective.tpot_ms))
            return ", ".join(f"{name} {ms:g} ms" for name, ms in named if ms is not None)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3)
