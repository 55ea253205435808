"""What all figures of a report share: style, ticks and legends, as SVG.

Black is drawn in a colour of its own. A page may replace it by its text's colour, so that one
drawing serves light pages and dark ones.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

INK = "#12ab34"  # stands for the text's colour until a page sets it
WIDTH = 7.6
FAILED = "#d00000"


@contextmanager
def plotting() -> Iterator[Any]:
    """Enter the style of all figures; yield pyplot."""
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


def svg(pyplot: Any, figure: Any) -> str:
    """Close a figure and return it as SVG."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def legend(figure: Any, axes: Any, failed: bool = False) -> None:
    """Put one legend above all panels; ``failed`` adds the cross of a point that failed."""
    handles, labels = axes.get_legend_handles_labels()
    if failed:
        (cross,) = axes.plot([], [], "x", color=FAILED, markersize=8, markeredgewidth=1.8)
        handles, labels = [*handles, cross], [*labels, "fails"]
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), columnspacing=1.2)


def set_ticks(axis: Any, values: Sequence[float]) -> None:
    """Put ticks at these values and nowhere else."""
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


def plain(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers; called when all is drawn."""
    if axes.dataLim.ymin <= 0 or not math.isfinite(axes.dataLim.ymin):
        axes.set_yticks([])  # nothing is drawn: nothing succeeded
        return
    axes.set_yscale("log")
    set_ticks(axes.yaxis, round_ticks(*axes.get_ylim()))
