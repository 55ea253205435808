"""Figures of single studies. The values come from the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import INK, WIDTH, legend, plain, plotting, set_ticks, svg

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
    with plotting() as pyplot:
        figure, (panels,) = pyplot.subplots(
            1, len(contexts), figsize=(WIDTH, 3.5), sharey=True, squeeze=False
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
            set_ticks(axes.xaxis, batches)
            count = rounds[context]
            axes.set_title(f"{context:,} tokens\n{count} round{'s' if count > 1 else ''}")
            axes.set_xlabel("running decodes")
        plain(panels[0])  # shared by all
        panels[0].set_ylabel("TPOT meanwhile, ms")
        legend(figure, panels[0])
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        return svg(pyplot, figure)


_WAYS = {
    "full_ttft_ms": ("remote, full prefill and transfer", "#d55e00"),
    "delta_ttft_ms": ("remote, delta transfer", "#e69f00"),
    "ttft_ms": ("local", "#0072b2"),
}


def before_and_after(run: Mapping[str, Any]) -> str:
    """Draw the TTFT of each turn of a demo in its three ways. The first turn is always remote."""
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.9))
        width = 0.27
        for index, (way, (label, color)) in enumerate(_WAYS.items()):
            turns = [turn + (index - 1) * width for turn in range(1, len(run[way]) + 1)]
            bars = axes.bar(turns, run[way], width * 0.94, color=color, label=label)
            axes.bar_label(bars, [f"{value:,.0f}" for value in run[way]], fontsize=7.5, padding=1)
        axes.set_xticks(range(1, len(run["ttft_ms"]) + 1))
        axes.set_xlabel("turn")
        axes.set_ylabel("TTFT, ms")
        axes.grid(axis="x", visible=False)
        legend(figure, axes)
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        return svg(pyplot, figure)


_VERDICTS = {"beats": "#009e73", "ties": "#8a8a8a", "loses": "#d55e00"}


def verdicts(judgements: Sequence[Mapping[str, Any]]) -> str:
    """Draw what a policy costs more or less than the best of the others, a panel for each trace."""
    names = [f"{verdict['weights']} {verdict['at']}" for verdict in judgements[0]["verdicts"]]
    with plotting() as pyplot:
        figure, (panels,) = pyplot.subplots(
            1,
            len(judgements),
            figsize=(WIDTH, 0.8 + 0.32 * len(names)),
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
        return svg(pyplot, figure)


_MIXES = (("#0072b2", "-", "o"), ("#e69f00", "--", "s"), ("#8a8a8a", ":", "D"))


def weights(mixes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw what moves as the weight moves from TPOT to TTFT, a curve for each mix of traffic."""
    panels = (
        (("local_share", 100.0), "later turns that go local, %"),
        (("ttft_p50_ms", 1.0), "TTFT of later turns, p50, ms"),
        (("tpot_p50_ms", 1.0), "TPOT of later turns, p50, ms"),
    )
    with plotting() as pyplot:
        figure, row = pyplot.subplots(1, 3, figsize=(WIDTH, 3.1))
        for axes, ((name, factor), title) in zip(row, panels, strict=True):
            for (mix, rows), (color, style, marker) in zip(mixes.items(), _MIXES, strict=False):
                y = [factor * point[name] for point in rows]
                x = [point["w_ttft"] for point in rows]
                axes.plot(x, y, style, color=color, marker=marker, markersize=3.5, label=mix)
            axes.set_ylim(0, 105 if factor > 1 else None)
            axes.set_title(title)
            axes.set_xlabel("w_ttft = 1 - w_tpot")
        legend(figure, row[0])
        figure.tight_layout(rect=(0, 0, 1, 0.91))
        return svg(pyplot, figure)
