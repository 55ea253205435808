"""The report's section of ``ppd-eval simulate map``: where which route has the lower TTFT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .drawing import WIDTH, plotting, svg
from .parts import Content, Section, Table, section
from .sources import RouteRow, Source, newest, read_source

_RUN = (
    "ppd-eval simulate map eval/sweep/route-map.toml --profiles ... --out results/route-map.jsonl"
)
_CHOICES = ("local", "tie", "remote")
_MOST = math.log(4.0)  # of a ratio, in the colours

Row = Mapping[str, Any]
Panel = tuple[str, float]  # profile, link


def route_map(folder: Path) -> Section:
    """Return the section.

    Raises:
        ConfigError: the raw file is broken.
    """
    return section(
        "route-map",
        "Where which route wins",
        "Median TTFT of later turns on the local route, divided by that of the remote route with "
        "delta transfer. In blue cells the local one is lower, in orange cells the remote one. "
        "The letter is the choice of even weights of TTFT and TPOT: L local, R remote, = a tie, "
        "in which the turn stays local. In a cell without a number more than one of "
        "twenty turns was refused or failed. Simulated, one prefill and one decode worker, from "
        "profiles. Appends after long contexts took longer than their profile on an H200, with "
        "another attention kernel: docs/EMULATION.md.",
        read_source(folder, "route-map.jsonl", RouteRow, _RUN),
        _content,
    )


def _content(whole: Source) -> Content:
    rows = newest(whole, "commit").rows
    panels = list(dict.fromkeys((row["profile"], row["link_gbps"]) for row in rows))
    head = ("machine", "link, Gb/s", "cells", "local / delta TTFT p50", "p90", *_CHOICES)
    lines = [_line(panel, _of(rows, panel)) for panel in panels]
    first = rows[0]
    caption = (
        f"replies of {first['output_tokens']:g} tokens, {first['qps']:g} turns/s; the ratio's "
        "median over cells, with its lowest and highest; choices at even weights"
    )
    return lambda: figure(rows), (Table(head, lines, caption),)


def _of(rows: Sequence[Row], panel: Panel) -> list[Row]:
    return [row for row in rows if (row["profile"], row["link_gbps"]) == panel]


def _line(panel: Panel, rows: Sequence[Row]) -> tuple[str, ...]:
    profile, gbps = panel
    ratios = (
        [row[f"local_ttft{at}_ms"] / row[f"remote_ttft{at}_ms"] for row in rows]
        for at in ("", "_p90")
    )
    spans = (f"{median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in ratios)
    counts = (f"{sum(row['choice'] == choice for row in rows)}" for choice in _CHOICES)
    return (f"`{profile}`", f"{gbps:g}", f"{len(rows)}", *spans, *counts)


def figure(rows: Sequence[Row]) -> str:
    """Draw a panel for each machine and link: contexts against new tokens."""
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    links = sorted({row["link_gbps"] for row in rows})
    contexts = sorted({row["context_tokens"] for row in rows}, reverse=True)
    news = sorted({row["new_tokens"] for row in rows})
    with plotting() as pyplot:
        size = (WIDTH, 0.9 + len(profiles) * (0.7 + 0.36 * len(contexts)))
        drawn, panels = pyplot.subplots(
            len(profiles), len(links), figsize=size, sharex=True, sharey=True, squeeze=False
        )
        for profile, of_profile in zip(profiles, panels, strict=True):
            for gbps, axes in zip(links, of_profile, strict=True):
                _panel(axes, _of(rows, (profile, gbps)), contexts, news)
                axes.set_title(f"{profile}\n{gbps:g} Gb/s", fontsize=8)
            of_profile[0].set_ylabel("context")
        for axes in panels[-1]:
            axes.set_xlabel("new tokens")
        drawn.tight_layout()
        return svg(pyplot, drawn)


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("routes", ("#0072b2", "#ffffff", "#d55e00"))


def _panel(
    axes: Any, rows: Sequence[Row], contexts: Sequence[float], news: Sequence[float]
) -> None:
    ratios = [[math.nan] * len(news) for _ in contexts]
    for row in rows:
        at = contexts.index(row["context_tokens"]), news.index(row["new_tokens"])
        ratio = row["local_ttft_ms"] / row["remote_ttft_ms"]
        ratios[at[0]][at[1]] = math.log(ratio)
        letter = {"local": "L", "remote": "R", "tie": "="}[row["choice"]]
        dark = abs(math.log(ratio)) > 0.6 * _MOST
        color = "white" if dark else "black"
        text = f"{ratio:.2f}x {letter}" if ratio < 9.95 else f"{ratio:.0f}x {letter}"
        axes.text(at[1], at[0], text, ha="center", va="center", fontsize=7, color=color)
    edges = [[at - 0.5 for at in range(len(of) + 1)] for of in (news, contexts)]
    axes.pcolormesh(*edges, ratios, cmap=_colours(), vmin=-_MOST, vmax=_MOST)
    axes.set_ylim(len(contexts) - 0.5, -0.5)  # the largest context above
    axes.grid(visible=False)
    axes.set_xticks(range(len(news)), [f"{value:,g}" for value in news])
    axes.set_yticks(range(len(contexts)), [f"{value:,g}" for value in contexts])
