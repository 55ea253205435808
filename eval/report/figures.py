"""Figures of all policies over load and turns. The values come from the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..policies.cells import THROUGHPUT, TPOT, TTFT, Cell
from .drawing import FAILED, WIDTH, legend, plain, plotting, set_ticks, svg

# Okabe and Ito's colours, which most colour-blind people can distinguish; and markers for all.
LOOKS = {
    "replica": ("#8a8a8a", "s"),
    "pd": ("#d55e00", "v"),
    "partial:0.5": ("#e69f00", "D"),
    "full": ("#0072b2", "^"),
    "threshold": ("#cc79a7", "P"),
    "ppd": ("#009e73", "o"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one curve, each with the lowest and highest of its seeds."""

    x: list[float]
    middle: list[float]
    least: list[float]
    most: list[float]


def line_of(
    cells: Sequence[Cell], side: str, metric: str, x: Callable[[Cell], float | None]
) -> Line:
    """A side's cells in the order given; without those where nothing succeeded."""
    line = Line([], [], [], [])
    for cell in cells:
        at, middle = x(cell), cell.middle(metric)
        if cell.side != side or at is None or middle is None:
            continue
        values = cell.values(metric)
        line.x.append(at)
        line.middle.append(middle)
        line.least.append(min(values))
        line.most.append(max(values))
    return line


def _curve(axes: Any, line: Line, side: str, shift: float = 1.0) -> None:
    color, marker = LOOKS[side]
    below = [middle - least for middle, least in zip(line.middle, line.least, strict=True)]
    above = [most - middle for middle, most in zip(line.middle, line.most, strict=True)]
    ours = side == "ppd"
    axes.errorbar(
        [x * shift for x in line.x],
        line.middle,
        yerr=(below, above),
        color=color,
        marker=marker,
        markersize=5.5 if ours else 4.5,
        linewidth=2.2 if ours else 1.3,
        elinewidth=0.8,
        capsize=1.5,
        label=side,
        zorder=3 if ours else 2,
    )


def _cross(axes: Any, cells: Sequence[Cell], metric: str, x: Callable[[Cell], float]) -> None:
    """A cross on every point that failed; on the upper edge if none of its turns succeeded."""
    for cell in cells:
        if not cell.failed:
            continue
        middle = cell.middle(metric)
        look = {"color": FAILED, "marker": "x", "markersize": 9, "markeredgewidth": 1.8}
        if middle is None:
            axes.plot(x(cell), 0.97, transform=axes.get_xaxis_transform(), **look, clip_on=False)
        else:
            axes.plot(x(cell), middle, **look, zorder=4)


_PANELS = (
    (TTFT, "TTFT of later turns, p50, ms"),
    ("ttft_p90_ms", "TTFT of later turns, p90, ms"),
    (TPOT, "TPOT, p50, ms"),
    ("tpot_p90_ms", "TPOT, p90, ms"),
)


def _sides(cells: Sequence[Cell]) -> list[str]:
    here = {cell.side for cell in cells}
    return [side for side in LOOKS if side in here]


def pareto(cells: Sequence[Cell]) -> str:
    """Draw TTFT against output tokens a second, a curve for each policy, a point for each rate."""
    with plotting() as pyplot:
        figure, panels = pyplot.subplots(1, 2, figsize=(WIDTH, 3.9))
        for axes, (metric, title) in zip(panels, _PANELS[:2], strict=True):
            for side in _sides(cells):
                fine = [cell for cell in cells if not cell.failed]
                _curve(
                    axes, line_of(fine, side, metric, lambda cell: cell.middle(THROUGHPUT)), side
                )
            for cell in cells:
                x, y = cell.middle(THROUGHPUT), cell.middle(metric)
                if cell.side == "ppd" and not cell.failed and x is not None and y is not None:
                    axes.annotate(
                        f"{cell.qps:g}/s",
                        (x, y),
                        xytext=(7, -11),
                        textcoords="offset points",
                        fontsize=8,
                        color=LOOKS["ppd"][0],
                    )
            axes.margins(x=0.12, y=0.12)
            plain(axes)
            axes.set_title(title)
            axes.set_xlabel("output tokens a second")
        legend(figure, panels[0])
        figure.tight_layout(rect=(0, 0, 1, 0.93))
        return svg(pyplot, figure)


def over_qps(cells: Sequence[Cell]) -> str:
    """Draw TTFT and TPOT against conversations a second; failures are marked."""
    return _four(cells, lambda cell: cell.qps, "conversations that begin in a second")


def over_turns(cells: Sequence[Cell]) -> str:
    """Draw metrics over turns; return SVG."""
    return _four(cells, lambda cell: float(cell.turns), "turns of a conversation")


def _four(cells: Sequence[Cell], x: Callable[[Cell], float], label: str) -> str:
    sides = _sides(cells)
    with plotting() as pyplot:
        figure, grid = pyplot.subplots(2, 2, figsize=(WIDTH, 5.6), sharex=True)
        for axes, (metric, title) in zip(grid.flat, _PANELS, strict=True):
            for number, side in enumerate(sides):
                # A little apart, or the whiskers of one would hide those of the others.
                shift = 1.018 ** (number - (len(sides) - 1) / 2)
                _curve(axes, line_of(cells, side, metric, x), side, shift)
            _cross(axes, cells, metric, x)
            axes.set_xscale("log", base=2)
            set_ticks(axes.xaxis, [x(cell) for cell in cells])
            plain(axes)
            axes.set_title(title)
        for axes in grid[1]:
            axes.set_xlabel(label)
        legend(figure, grid[0][0], failed=any(cell.failed for cell in cells))
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        return svg(pyplot, figure)
