"""``ppd-eval table show``: a table as a heat map, in the terminal and as a picture.

Rows are contexts and inputs, columns are replies and rates. A cell shows the route that it chooses
and how clearly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec import structs

from ppd.errors import ConfigError
from ppd.score import Weights, score
from ppd.table import Cell, Costs, Table
from ppd.table_file import CellRecord

from .lint import noise_decided
from .reading import read

_WIDTH = 8
# Of a score, from clearly remote to clearly local; colours of the 256 of a terminal.
_SHADES = ((-0.3, 25), (-0.1, 67), (0.0, 153), (0.1, 223), (0.3, 215), (9e9, 208))


def run(path: Path, weights: Weights, details: bool, png: Path | None) -> int:
    """Print a table as a heat map.

    Raises:
        TableError: it is no table, or has no throughput to weigh.
        ConfigError: the picture cannot be written.
    """
    table = read(path, weights)
    record = table.record
    print(f"{record.model}, {record.shape}, {record.provenance.hardware}")
    if note := record.provenance.note:
        print(f"note: {note}")
    print(
        f"a token to prefill {record.prefill_ms_per_token:.3f} ms, to append "
        f"{record.append_ms_per_token:.3f} ms; weights TTFT {weights.ttft:g}, TPOT "
        f"{weights.tpot:g}, throughput {weights.throughput:g}"
    )
    _print_map(table, weights)
    if details:
        _print_cells(table, weights)
    if png is not None:
        _draw(table, weights, png)
    return 0


def _print_map(table: Table, weights: Weights) -> None:
    axes = table.record.axes
    coloured = sys.stdout.isatty()
    columns = [(o, q) for o in axes.output_tokens for q in axes.qps]
    print(f"\n{'context':>8} {'new':>7}  score of a local turn by reply length and turns/s")
    heads = [f"{_short(o.at)}@{q.at:g}" for o, q in columns]
    print(" " * 18 + "".join(head.rjust(_WIDTH) for head in heads))
    cells = iter(table.cells)
    records = _by_bins(table)
    for context in axes.context_tokens:
        for new in axes.new_tokens:
            texts = []
            for _ in columns:
                cell = next(cells)
                points = score(weights, cell.remote, cell.local).local
                mark = _mark(cell, records[cell.index], weights)
                text = f"{points:+.2f}{mark}".rjust(_WIDTH)
                texts.append(f"\033[48;5;{_shade(points)};30m{text}\033[0m" if coloured else text)
            print(f"{_short(context.at):>8} {_short(new.at):>7}  " + "".join(texts))
    print("above 0: local; ~ noise may have decided; ' not measured, from the cells around\n")


def _mark(cell: Cell, record: CellRecord, weights: Weights) -> str:
    if not record.measured:
        return "'"
    return "~" if noise_decided(cell, weights) else " "


def _shade(points: float) -> int:
    return next(colour for most, colour in _SHADES if points <= most)


def _short(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 256 == 0 else f"{tokens:g}"


def _by_bins(table: Table) -> list[CellRecord]:
    return sorted(table.record.cells, key=lambda record: record.bins)


def _print_cells(table: Table, weights: Weights) -> None:
    """What local saves and loses in each cell, a line each."""
    heads = f"{'TTFT ms':>17}  {'TPOT ms':>15}  {'tokens/s':>15}"
    print(f"{heads}  saves TTFT  loses TPOT  adds tokens/s   score  cell")
    for cell in table.cells:
        remote, local = cell.remote, cell.local
        result = score(weights, remote, local)
        print(
            f"{remote.ttft_ms:7.1f} > {local.ttft_ms:7.1f}  {remote.tpot_ms:6.2f} > "
            f"{local.tpot_ms:6.2f}  {_per_second(remote)} > {_per_second(local)}  "
            f"{result.ttft_saved:10.0%}  {result.tpot_lost:10.0%}  "
            f"{result.throughput_gained:13.0%}  {result.local:6.2f}  "
            f"{cell.label}{'  local' if result.prefers_local else ''}"
        )


def _per_second(costs: Costs) -> str:
    return f"{costs.tokens_per_s:6.0f}" if costs.tokens_per_s else f"{'-':>6}"


def _draw(table: Table, weights: Weights, png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes, records = table.record.axes, _by_bins(table)
    rows = [(c, n) for c in axes.context_tokens for n in axes.new_tokens]
    columns = [(o, q) for o in axes.output_tokens for q in axes.qps]
    points = [score(weights, cell.remote, cell.local).local for cell in table.cells]
    grid = [points[i * len(columns) : (i + 1) * len(columns)] for i in range(len(rows))]
    size = (3.2 + 0.85 * len(columns), 2.1 + 0.46 * len(rows))
    figure, plot = plt.subplots(figsize=size, layout="constrained")
    most = max(0.1, min(1.0, max(map(abs, points))))
    image = plot.imshow(grid, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    for cell in table.cells:
        row, column = divmod(cell.index, len(columns))
        value = grid[row][column]
        dark = abs(value) > 0.6 * most
        text = f"{value:+.2f}{_mark(cell, records[cell.index], weights).strip()}"
        colour: Any = "white" if dark else "black"
        plot.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    plot.set_xticks(range(len(columns)), [f"{_short(o.at)} out\n{q.at:g}/s" for o, q in columns])
    plot.set_yticks(range(len(rows)), [f"{_short(c.at)} + {_short(n.at)}" for c, n in rows])
    plot.set_xlabel("reply tokens, turns/s for each decode worker")
    plot.set_ylabel("context + new tokens")
    for edge in range(1, len(axes.context_tokens)):
        plot.axhline(edge * len(axes.new_tokens) - 0.5, color="black", linewidth=0.8)
    for edge in range(1, len(axes.output_tokens)):
        plot.axvline(edge * len(axes.qps) - 0.5, color="black", linewidth=0.8)
    record = table.record
    named = (f"w_{name} {weight:g}" for name, weight in structs.asdict(weights).items())
    plot.set_title(f"{record.model}, {record.shape}\n{', '.join(named)}", fontsize=9)
    figure.colorbar(image, label="< 0: remote       > 0: local", shrink=0.9)
    figure.supxlabel(
        "~ noise may have decided    ' not measured, from the cells around", fontsize=7
    )
    try:
        figure.savefig(png, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{png}: cannot be written: {error}") from error
    finally:
        plt.close(figure)
