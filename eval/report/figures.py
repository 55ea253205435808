"""Figures of a report, as SVG: axes, colours, legends. The values come from the caller.

Black is drawn in a colour of its own. A page may replace it by its text's colour, so that one
drawing serves light pages and dark ones.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..policies.cells import THROUGHPUT, TPOT, TTFT, Cell

INK = "#12ab34"  # stands for the text's colour until a page sets it
_WIDTH = 7.6

# Okabe and Ito's colours, which most colour-blind people can distinguish; and markers for all.
LOOKS = {
    "replica": ("#8a8a8a", "s"),
    "pd": ("#d55e00", "v"),
    "partial:0.5": ("#e69f00", "D"),
    "full": ("#0072b2", "^"),
    "threshold": ("#cc79a7", "P"),
    "ppd": ("#009e73", "o"),
}
_FAILED = "#d00000"


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one curve, each with the lowest and highest of its seeds."""

    x: list[float]
    middle: list[float]
    least: list[float]
    most: list[float]


@contextmanager
def _style() -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    sizes = {"font.size": 9, "axes.titlesize": 9.5, "legend.fontsize": 8.5}
    with mpl.rc_context(
        {
            **dict.fromkeys(inks, INK),
            **sizes,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": INK,
            "grid.alpha": 0.15,
            "axes.grid": True,
            "svg.hashsalt": "ppd",  # the same figure, the same file
        }
    ):
        yield pyplot


def _svg(pyplot: Any, figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


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
        look = {"color": _FAILED, "marker": "x", "markersize": 9, "markeredgewidth": 1.8}
        if middle is None:
            axes.plot(x(cell), 0.97, transform=axes.get_xaxis_transform(), **look, clip_on=False)
        else:
            axes.plot(x(cell), middle, **look, zorder=4)


def _legend(figure: Any, axes: Any, failed: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if failed:
        (cross,) = axes.plot([], [], "x", color=_FAILED, markersize=8, markeredgewidth=1.8)
        handles, labels = [*handles, cross], [*labels, "fails"]
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), columnspacing=1.2)


def _ticks(axis: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_ticklabels([f"{value:,g}" for value in sorted(set(values))])


def round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive ones, if possible at least three."""
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(n / 10 for n in range(10, 100, 5))):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = (step * 10.0**decade for decade in decades for step in steps)
        found = [round(tick, 9) for tick in ticks if low <= tick <= high]
        if len(found) >= 3:
            break
    return found


def _plain(axes: Any) -> None:
    """A logarithmic y axis with numbers as people write them; when all is drawn."""
    if axes.dataLim.ymin <= 0 or not math.isfinite(axes.dataLim.ymin):
        axes.set_yticks([])  # nothing is drawn: nothing succeeded
        return
    axes.set_yscale("log")
    _ticks(axes.yaxis, round_ticks(*axes.get_ylim()))


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
    with _style() as pyplot:
        figure, panels = pyplot.subplots(1, 2, figsize=(_WIDTH, 3.9))
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
            _plain(axes)
            axes.set_title(title)
            axes.set_xlabel("output tokens a second")
        _legend(figure, panels[0])
        figure.tight_layout(rect=(0, 0, 1, 0.93))
        return _svg(pyplot, figure)


def over_qps(cells: Sequence[Cell]) -> str:
    """Draw TTFT and TPOT against conversations a second; failures are marked."""
    return _four(cells, lambda cell: cell.qps, "conversations that begin in a second")


def over_turns(cells: Sequence[Cell]) -> str:
    """Draw metrics over turns; return SVG."""
    return _four(cells, lambda cell: float(cell.turns), "turns of a conversation")


def _four(cells: Sequence[Cell], x: Callable[[Cell], float], label: str) -> str:
    sides = _sides(cells)
    with _style() as pyplot:
        figure, grid = pyplot.subplots(2, 2, figsize=(_WIDTH, 5.6), sharex=True)
        for axes, (metric, title) in zip(grid.flat, _PANELS, strict=True):
            for number, side in enumerate(sides):
                # A little apart, or the whiskers of one would hide those of the others.
                shift = 1.018 ** (number - (len(sides) - 1) / 2)
                _curve(axes, line_of(cells, side, metric, x), side, shift)
            _cross(axes, cells, metric, x)
            axes.set_xscale("log", base=2)
            _ticks(axes.xaxis, [x(cell) for cell in cells])
            _plain(axes)
            axes.set_title(title)
        for axes in grid[1]:
            axes.set_xlabel(label)
        _legend(figure, grid[0][0], failed=any(cell.failed for cell in cells))
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        return _svg(pyplot, figure)


_ARMS = {
    (0, "none"): ("decoding alone", INK, ":", "."),
    (1, "append"): ("1 append", "#0072b2", "-", "o"),
    (4, "append"): ("4 appends", "#0072b2", "--", "s"),
    (1, "full"): ("1 full prefill", "#d55e00", "-", "^"),
    (4, "full"): ("4 full prefills", "#d55e00", "--", "v"),
}


def interference(cells: Sequence[Mapping[str, Any]], rounds: Mapping[int, int]) -> str:
    """Draw the TPOT of running decodes against their number, a panel for each context.

    Args:
        rounds: of each context.
    """
    contexts = sorted({cell["context"] for cell in cells})
    batches = sorted({cell["batch"] for cell in cells})
    with _style() as pyplot:
        figure, (panels,) = pyplot.subplots(
            1, len(contexts), figsize=(_WIDTH, 3.5), sharey=True, squeeze=False
        )
        for axes, context in zip(panels, contexts, strict=True):
            for arm, (label, color, style, marker) in _ARMS.items():
                line = sorted(
                    (cell["batch"], cell["tpot_ms"])
                    for cell in cells
                    if cell["context"] == context and (cell["prefills"], cell["kind"]) == arm
                )
                x, y = zip(*line, strict=True) if line else ((), ())
                axes.plot(x, y, style, color=color, marker=marker, markersize=4, label=label)
            axes.set_xscale("log", base=2)
            _ticks(axes.xaxis, batches)
            count = rounds[context]
            axes.set_title(f"{context:,} tokens\n{count} round{'s' if count > 1 else ''}")
            axes.set_xlabel("running decodes")
        _plain(panels[0])  # shared by all
        panels[0].set_ylabel("TPOT meanwhile, ms")
        _legend(figure, panels[0])
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        return _svg(pyplot, figure)


_VERDICTS = {"beats": "#009e73", "ties": "#8a8a8a", "loses": "#d55e00"}


def verdicts(judgements: Sequence[Mapping[str, Any]]) -> str:
    """Draw what a policy costs more or less than the best of the others, a panel for each trace."""
    names = [f"{verdict['weights']} {verdict['at']}" for verdict in judgements[0]["verdicts"]]
    with _style() as pyplot:
        figure, (panels,) = pyplot.subplots(
            1,
            len(judgements),
            figsize=(_WIDTH, 0.8 + 0.32 * len(names)),
            sharey=True,
            squeeze=False,
        )
        for axes, of in zip(panels, judgements, strict=True):
            for y, verdict in enumerate(of["verdicts"]):
                color = _VERDICTS[verdict["verdict"]]
                axes.plot(
                    verdict["interval"], [y, y], color=color, linewidth=2, solid_capstyle="butt"
                )
                axes.plot(verdict["difference"], y, "o", color=color, markersize=5)
                axes.annotate(
                    verdict["best_static"],
                    (max(verdict["interval"]), y),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
            axes.axvline(0.0, color=INK, linewidth=0.8)
            low, high = axes.get_xlim()
            axes.set_xlim(low, high + 0.45 * (high - low))  # room for names
            axes.set_title(of["trace"])
            axes.set_xlabel("cost of ppd less the best other's")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        panels[0].set_ylabel("w_ttft:w_tpot, quantile")
        figure.tight_layout()
        return _svg(pyplot, figure)


_MIXES = (("#0072b2", "-", "o"), ("#e69f00", "--", "s"), ("#8a8a8a", ":", "D"))


def weights(mixes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw what moves as the weight moves from TPOT to TTFT, a curve for each mix of traffic."""
    panels = (
        (("local_share", 100.0), "later turns that go local, %"),
        (("ttft_p50_ms", 1.0), "TTFT of later turns, p50, ms"),
        (("tpot_p50_ms", 1.0), "TPOT of later turns, p50, ms"),
    )
    with _style() as pyplot:
        figure, row = pyplot.subplots(1, 3, figsize=(_WIDTH, 3.1))
        for axes, ((name, factor), title) in zip(row, panels, strict=True):
            for (mix, rows), (color, style, marker) in zip(mixes.items(), _MIXES, strict=False):
                y = [factor * point[name] for point in rows]
                x = [point["w_ttft"] for point in rows]
                axes.plot(x, y, style, color=color, marker=marker, markersize=3.5, label=mix)
            axes.set_ylim(0, 105 if factor > 1 else None)
            axes.set_title(title)
            axes.set_xlabel("w_ttft = 1 - w_tpot")
        _legend(figure, row[0])
        figure.tight_layout(rect=(0, 0, 1, 0.91))
        return _svg(pyplot, figure)
