"""The shipped tables of GPUs, from the raw rows of sweeps on emulated clusters."""

from __future__ import annotations

from collections import Counter

from ppd.score import Weights

from ..parts import Block, Table, block, short
from ..results import Results
from ..sweeps import AXES, MeasuredCell, Sweep, points, sweep_of

# Raw rows by the short name of a model, in the order of columns.
_SWEEPS = {
    "Llama-8B": "sweep-emulated-llama.jsonl",
    "Qwen3-32B": "sweep-emulated-qwen.jsonl",
    "DeepSeek-V3": "sweep-emulated-deepseek.jsonl",
}
_WEIGHTINGS = {"1:1": Weights(), "1:3": Weights(tpot=3.0), "3:1": Weights(ttft=3.0)}


def tables(results: Results) -> Block:
    """Return what each sweep was of, and which routes its table chooses."""
    lines, made_of = [], []
    for name, file in _SWEEPS.items():
        sweep, rows = sweep_of(results, file), results.rows(file)
        runs = rows.where(row="run")
        made_of.append(runs)
        row = runs.rows[-1]
        lines.append(
            (
                name,
                f"`{row['profile']}`, `{row['calibration']}`",
                f"{row['link_gbps']:g}",
                f"{row['slow_motion']:g}",
                f"{len(sweep.cells)}",
                _seeds(sweep),
                *(_choices(sweep, weights) for weights in _WEIGHTINGS.values()),
            )
        )
    head = ("model", "profile, calibration", "link, Gb/s", "slow motion", "cells", "seeds")
    caption = "cells that go local / go remote / are a tie, at weights of TTFT and TPOT"
    return block(Table((*head, *_WEIGHTINGS), lines, caption), made_of=made_of)


def _seeds(sweep: Sweep) -> str:
    """How many a cell has."""
    numbers = [len(cell.record.seeds) for cell in sweep.cells]
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _choices(sweep: Sweep, weights: Weights) -> str:
    counted = Counter(cell.choice(weights) for cell in sweep.cells)
    return " / ".join(f"{counted[choice]}" for choice in ("local", "remote", "tie"))


def cells(results: Results) -> Block:
    """Return the cells of all tables, side by side."""
    sweeps = [sweep_of(results, file) for file in _SWEEPS.values()]
    by_bins = [{cell.record.bins: cell for cell in sweep.cells} for sweep in sweeps]
    common = sorted(set.intersection(*map(set, by_bins)))
    lines = [
        (
            *points(sweeps[0], by_bins[0][bins]),
            *(text for of in by_bins for text in _costs(of[bins])),
        )
        for bins in common
    ]
    head = [*AXES]
    for name in _SWEEPS:
        head += [f"{name}: TTFT", "TPOT", "1:1"]
    caption = (
        "remote / local, ms: medians of later turns; ±: half of what those of the seeds lie apart; "
        "tie: the score is within two standard errors of 0"
    )
    made_of = [results.rows(file).where(row="run") for file in _SWEEPS.values()]
    return block(Table(tuple(head), lines, caption), made_of=made_of)


def _costs(cell: MeasuredCell) -> tuple[str, str, str]:
    both = cell.record.remote, cell.record.local
    return (
        " / ".join(f"{short(of.ttft_ms.median)}±{_half(of.ttft_ms.spread)}" for of in both),
        " / ".join(short(of.tpot_ms.median) for of in both),
        cell.choice(_WEIGHTINGS["1:1"]),
    )


def _half(spread: float) -> str:
    half = spread / 2
    return f"{half:.0f}" if half >= 10 else f"{half:.1g}"


BLOCKS = {"gpu-tables": tables, "gpu-table-cells": cells}
