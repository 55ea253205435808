"""The policies side by side, as sections of a report: from ``policy-grid`` rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..policies import cells as grid_cells
from ..policies.cells import Cell
from . import figures as report_figures
from .parts import Content, Section, Table, percent, section, short
from .sources import GridRow, NotMeasured, Source, newest, read_source

_POLICIES = (
    "replica: two workers that do both, a core each. All others: one prefill and one decode "
    "worker, a core each. pd: every turn through the prefill worker, which sends what the "
    "decode worker lacks. full: later turns on the decode worker. partial:0.5: half of the "
    "conversations so. threshold: NVIDIA Dynamo's rule (fewer than 2,048 uncached tokens and "
    "less than 0.7 of the prompt). ppd: the measured table."
)


def grid_sections(folder: Path) -> list[Section]:
    """Return the sections on all policies over load and turns."""
    source = read_source(
        folder, "policy-grid.jsonl", GridRow, "make policy-grid RECORD=results/policy-grid.jsonl"
    )
    if isinstance(source, Source):
        source = newest(source, "grid")

    def cells(of: Source, over: str) -> list[Cell]:
        """Of the cross's two arms, the one along which ``over`` changes."""
        found = grid_cells.summarize(of.rows)
        fixed = "turns" if over == "qps" else "qps"
        by_fixed: dict[float, set[float]] = {}
        for cell in found:
            by_fixed.setdefault(getattr(cell, fixed), set()).add(getattr(cell, over))
        arm = max(by_fixed, key=lambda value: len(by_fixed[value]))
        return [cell for cell in found if getattr(cell, fixed) == arm]

    def figure(draw: Callable[[Sequence[Cell]], str], over: str) -> Callable[[Source], Content]:
        def make(of: Source) -> Content:
            found = cells(of, over)
            return lambda: draw(found), (_numbers(found),)

        return make

    whiskers = (
        "Points are medians over seeds, whiskers their least and most; the same seeds, and so the "
        "same arrivals and lengths, for every policy."
    )
    return [
        section(
            "pareto",
            "TTFT against throughput",
            "Further right and lower is better. A point is a rate of arrivals (written at ppd's); "
            f"points at which a policy fails are left out. {_POLICIES} {_load(source)}",
            source,
            figure(report_figures.pareto, "qps"),
        ),
        section(
            "latency-qps",
            "Latency under load",
            f"{whiskers} A cross marks a point that fails: less than 95 % of the turns planned "
            f"ended in time, in any of the runs. {_load(source)}",
            source,
            figure(report_figures.over_qps, "qps"),
        ),
        section(
            "turns",
            "Longer conversations",
            f"More turns mean longer histories and more turns a second. {whiskers} {_load(source)}",
            source,
            figure(report_figures.over_turns, "turns"),
        ),
        section(
            "winners",
            "Which policy wins",
            "Best median first. A policy that is not beaten with every seed shares the win (=); so "
            f"{_chance(source)}. TTFT: of later turns. Both: mean of TTFT and TPOT (p50) as "
            "multiples of pd's, even weights. Policies that fail at a point cannot win it; points "
            "that were not measured with every policy are left out.",
            source,
            lambda of: (None, _winners(complete(grid_cells.summarize(of.rows)))),
        ),
    ]


def _chance(source: Source | NotMeasured) -> str:
    seeds = 3 if isinstance(source, NotMeasured) else len({row["seed"] for row in source.rows})
    return f"with {seeds} seed{'s' * (seeds > 1)}, of equals one beats another once in {2**seeds}"


def complete(cells: Sequence[Cell]) -> list[Cell]:
    """Return the rows of points that all sides have measured, with the same seeds."""
    sides = {cell.side for cell in cells}
    seeds: dict[tuple[int, float], list[frozenset[int]]] = {}
    for cell in cells:
        seeds.setdefault((cell.turns, cell.qps), []).append(frozenset(cell.by_seed))
    return [
        cell
        for cell in cells
        if len(found := seeds[cell.turns, cell.qps]) == len(sides) and len(set(found)) == 1
    ]


def _load(source: Source | NotMeasured) -> str:
    if isinstance(source, NotMeasured):
        return ""
    row = source.rows[-1]
    first, new, reply = row["sizes"]
    return (
        f"First turns bring {first:,} tokens, later ones {new}; replies have {reply}; "
        f"{row['think_s']:g} s of thought on the mean; conversations begin for "
        f"{row['arrivals_s']:g} s, a turn may take {row['timeout_s']:g} s."
    )


_GRID_HEAD = (
    "turns",
    "QPS",
    "policy",
    "T2+ TTFT p50",
    "p90",
    "TPOT p50",
    "p90",
    "tokens/s",
    "succeeded",
    "local",
)


def _numbers(cells: Sequence[Cell]) -> Table:
    rows = []
    for cell in cells:
        values = [cell.middle(metric) for metric in grid_cells.METRICS[:-1]]
        figures = [short(value) for value in values[:5]]
        shares = [percent(value) for value in values[5:]]
        rows.append((f"{cell.turns}", f"{cell.qps:g}", cell.side, *figures, *shares))
    return Table(_GRID_HEAD, rows, "medians over seeds; ms")


_CONTESTS = (
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p90_ms", "TTFT p90"),
    ("tpot_p50_ms", "TPOT p50"),
    ("tpot_p90_ms", "TPOT p90"),
    ("tokens_per_s", "tokens/s"),
    ("both", "both"),
)


def _winners(cells: Sequence[Cell]) -> tuple[Table, ...]:
    won = {metric: grid_cells.winners(cells, metric) for metric, _ in _CONTESTS}
    points = dict.fromkeys((winner.turns, winner.qps) for ones in won.values() for winner in ones)
    by_point = {
        (metric, winner.turns, winner.qps): winner.sides
        for metric, ones in won.items()
        for winner in ones
    }
    rows = [
        (
            f"{turns}",
            f"{qps:g}",
            *(" = ".join(by_point.get((metric, turns, qps), ("none",))) for metric, _ in _CONTESTS),
        )
        for turns, qps in points
    ]
    names = tuple(name for _, name in _CONTESTS)
    shares = []
    for side in report_figures.LOOKS:
        lines = []
        for metric, _ in _CONTESTS:
            of = won[metric]
            alone = sum(winner.sides == (side,) for winner in of)
            shared = sum(side in winner.sides and len(winner.sides) > 1 for winner in of)
            lines.append(f"{alone} + {shared}")
        if any(cell.side == side for cell in cells):
            shares.append((side, *lines))
    return (
        Table(("turns", "QPS", *names), rows, "winners by point"),
        Table(("policy", *names), shares, f"of {len(points)} points: won alone + shared"),
    )
