"""The shipped decision table and the small one, from the raw rows of their sweeps."""

from __future__ import annotations

from collections import Counter

from ppd.score import Weights, score
from ppd.table_file import Statistic

from ..parts import Block, Table, block, short
from ..results import Results
from ..sweeps import AXES, MeasuredCell, Sweep, points, sweep_of

_SHIPPED, _SMALL = "sweep-cpu.jsonl", "sweep-small.jsonl"
_EVEN, _ALL = Weights(), Weights(throughput=1.0)
_THROUGHPUT = Weights(ttft=0.0, tpot=0.0, throughput=1.0)
# Of the README: where local saves, where it costs, and where it cannot be told.
_EXAMPLES = ((0, 0, 0, 0), (1, 0, 1, 0), (1, 1, 1, 1), (0, 2, 0, 1), (1, 2, 1, 1))


def _line(sweep: Sweep, cell: MeasuredCell) -> tuple[str, ...]:
    sides = (cell.record.remote, cell.record.local)
    ttft = (
        f"{short(side.ttft_ms.median)} / {short(p90)}"
        for side, p90 in zip(sides, cell.ttft_p90_ms, strict=True)
    )
    tpot = (_with_spread(side.tpot_ms) for side in sides)
    return (*points(sweep, cell), *ttft, *tpot, cell.choice(_EVEN))


def _with_spread(of: Statistic) -> str:
    return f"{short(of.median)} ± {of.spread / 2:.2g}"


_COSTS = ("TTFT remote", "TTFT local", "TPOT remote", "TPOT local")
_COLUMNS = (*AXES, *_COSTS, "even weights")


def _caption(sweep: Sweep) -> str:
    return (
        "TTFT p50 / p90 and TPOT p50 of later turns, ms; ±: half of what the medians of "
        f"{len(sweep.config.seeds)} seeds lie apart; tie: the score is within two standard errors "
        "of 0"
    )


def cells(results: Results) -> Block:
    """Return all cells of the shipped table."""
    sweep = sweep_of(results, _SHIPPED)
    lines = [_line(sweep, cell) for cell in sweep.cells]
    return block(Table(_COLUMNS, lines, _caption(sweep)), made_of=[results.rows(_SHIPPED)])


def examples(results: Results) -> Block:
    """Return some cells of the shipped table."""
    sweep = sweep_of(results, _SHIPPED)
    by_bins = {cell.record.bins: cell for cell in sweep.cells}
    lines = [_line(sweep, by_bins[bins]) for bins in _EXAMPLES]
    return block(Table(_COLUMNS, lines, _caption(sweep)), made_of=[results.rows(_SHIPPED)])


def throughput(results: Results) -> Block:
    """Return the throughput of all cells of the shipped table, and what its weight makes of it."""
    sweep = sweep_of(results, _SHIPPED)
    lines = []
    for one in sweep.cells:
        remote, local = one.cell.remote, one.cell.local
        gained = 100 * score(_EVEN, remote, local).throughput_gained
        choices = (one.choice(weights) for weights in (_EVEN, _THROUGHPUT, _ALL))
        lines.append(
            (
                *points(sweep, one),
                f"{remote.tokens_per_s:.0f}",
                f"{local.tokens_per_s:.0f}",
                f"{gained:+.1f} ± {100 * one.cell.noise.throughput:.1f} %",
                *choices,
            )
        )
    head = (*AXES, "remote", "local", "gained", "1:1:0", "0:0:1", "1:1:1")
    caption = (
        f"output tokens a second, geometric mean of {len(sweep.config.seeds)} seeds; gained: mean "
        "ratio of the same seeds, with its standard error; then the choices at weights of TTFT, "
        "TPOT and throughput"
    )
    return block(Table(head, lines, caption), made_of=[results.rows(_SHIPPED)])


def small(results: Results) -> Block:
    """Return what the small sweep took, and what its table says."""
    sweep, rows = sweep_of(results, _SMALL), results.rows(_SMALL)
    runs = rows.where(row="run")
    choices = Counter(cell.choice(_EVEN) for cell in sweep.cells)
    axes = sweep.config.axes
    grid = len(axes.context_tokens) * len(axes.new_tokens) * len(axes.output_tokens) * len(axes.qps)
    head = ("cells", "measured", "local", "remote", "tie", "runs", "time in runs, s")
    counted = (choices[choice] for choice in ("local", "remote", "tie"))
    line = (grid, len(sweep.cells), *counted, len(runs), round(sum(runs.values("wall_s"))))
    caption = "the small sweep; choices of the measured cells at even weights"
    return block(Table(head, [tuple(f"{n:,}" for n in line)], caption), made_of=[rows])


def _tied(results: Results) -> str:
    return f"{sum(cell.choice(_EVEN) == 'tie' for cell in sweep_of(results, _SHIPPED).cells)}"


def _count(results: Results) -> str:
    return f"{len(sweep_of(results, _SHIPPED).cells)}"


BLOCKS = {
    "table-cells": cells,
    "table-examples": examples,
    "table-throughput": throughput,
    "small-sweep": small,
}
NUMBERS = {"table-ties": _tied, "table-cells": _count}
