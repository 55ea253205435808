"""Figures 1, 5, 6 and 10 of the PPD paper, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...simulation.paper_figures import FIGURE_10_GBPS
from ..parts import PAPER_MACHINE, Block, Table, block, change, short
from ..results import Results, Rows

_BASELINES = ("4R", "1P_3D", "2P_2D", "3P_1D")
_LOCAL, _REMOTE = "1P_3pD", "1P_3D"
# What the paper prints of Figures 5 and 6. What it only draws was read off the plots, to about 2 %.
_LINKS = {150.0: ("143.7", "51", "8.07", "3,028"), 10.0: ("170.6", "51", "8.38", "3,169")}
_WEIGHTED = {
    8.0: {0.2: ("-19 %", "+1 %"), 0.5: ("-48 %", "+3 %"), 0.95: ("-96 %", "+7 %")},
    16.0: {0.2: ("-19 %", "+2 %"), 0.5: ("-47 %", "+6 %"), 0.95: ("-94 %", "+12 %")},
}
_DRAWN = {  # Figure 1, by QPS
    0.5: ("1,900", "1,670", "98", "62"),
    1.0: ("1,460", "1,850", "98", "100"),
    1.5: ("1,860", "1,390", "98", "83"),
}
_READINGS = {"once": "of the first turn", "each": "of each turn"}


def figures(results: Results) -> Block:
    """Return the four figures as tables."""
    rows = results.rows("simulate-figures.jsonl").newest()
    return block(_pareto(rows), _links(rows), _weights(rows), _models(rows), made_of=[rows])


def _pareto(rows: Rows) -> Table:
    table = []
    of = rows.where(figure="1")
    for reading in dict.fromkeys(of.values("reading")):
        for qps in dict.fromkeys(of.values("qps")):
            here = list(of.where(reading=reading, qps=qps))
            fixed = [row for row in here if row["configuration"] in _BASELINES]
            capable = [row for row in here if row["configuration"] not in _BASELINES]
            table.append(
                (
                    _READINGS[reading],
                    f"{qps:g}",
                    *(_best(some, "ttft_p99_ms", min) for some in (fixed, capable)),
                    *(_best(some, "tokens_per_s", max) for some in (fixed, capable)),
                )
            )
    table += [("in the paper's plot", f"{qps:g}", *drawn) for qps, drawn in _DRAWN.items()]
    head = ("10k tokens are", "QPS", "lowest p99 TTFT, ms: 4R or PD", "mixed")
    caption = (
        "Figure 1, five turns: the best of 4 baselines, and of the 13 mixed shapes; "
        f"Figures 1, 5 and 6 are {PAPER_MACHINE}"
    )
    return Table((*head, "most tokens/s: 4R or PD", "mixed"), table, caption)


def _best(rows: list[Mapping[str, Any]], name: str, of: Callable[..., Any]) -> str:
    found = of(rows, key=lambda row: row[name])
    return f"{found[name]:,.0f} `{found['configuration']}`"


def _links(rows: Rows) -> Table:
    table = []
    of = rows.where(figure="5")
    for link in dict.fromkeys(of.values("axis")):
        remote, local = (_one(of, axis=link, configuration=name) for name in (_REMOTE, _LOCAL))
        printed = _LINKS.get(link)
        simulated = (
            short(remote["t2_ttft_ms"]),
            short(local["t2_ttft_ms"]),
            f"{remote['t2_tpot_ms']:.2f}",
            f"{remote['turn_ms']:,.0f}",
        )
        cells = (
            value if printed is None else f"{value} ({stated})"
            for value, stated in zip(simulated, printed or simulated, strict=True)
        )
        table.append((f"{link:g}", *cells))
    head = ("link, GB/s", "TTFT, x=0", "TTFT, x=1", "TPOT, x=0", "whole turn, x=0")
    return Table(head, table, "Figure 5, later turns, mean ms (in the paper)")


def _weights(rows: Rows) -> Table:
    table = []
    of = rows.where(figure="6")
    for qps in dict.fromkeys(of.values("qps")):
        base = _one(of, qps=qps, axis=0.0)
        for row in of.where(qps=qps):
            if not row["axis"]:
                continue
            ttft = change(row["t2_ttft_ms"] / base["t2_ttft_ms"])
            tpot = change(row["t2_tpot_ms"] / base["t2_tpot_ms"])
            drawn = _WEIGHTED[qps][row["axis"]]
            cells = (f"{value} ({of_it})" for value, of_it in zip((ttft, tpot), drawn, strict=True))
            table.append((f"{qps:g}", f"{100 * row['axis']:g} %", *cells))
    head = ("QPS", "local conversations", "TTFT", "TPOT")
    caption = (
        "Figure 6, `1P_3pD`, change against no local turn (in the paper; printed for 95 %, others "
        "read off the plot)"
    )
    return Table(head, table, caption)


def _models(rows: Rows) -> Table:
    of = rows.where(figure="10")
    counts = list(dict.fromkeys(of.values("axis")))
    table = []
    for profile in dict.fromkeys(of.values("reading")):
        cells = []
        for count in counts:
            remote, local = (
                _one(of, reading=profile, axis=count, configuration=name)["t2_ttft_ms"]
                for name in (_REMOTE, _LOCAL)
            )
            cells.append(change(local / remote))
        table.append((f"`{profile}`", *cells))
    head = ("profile", *(f"{count:g} turns" for count in counts))
    caption = (
        "Figure 10, TTFT of later turns, x=1 against x=0 (in the paper about -70 % everywhere); "
        f"simulator with profiles, links of {FIGURE_10_GBPS:g} Gb/s"
    )
    return Table(head, table, caption)


def _one(rows: Rows, **where: object) -> Mapping[str, Any]:
    (found,) = rows.where(**where)
    return found


BLOCKS: dict[str, Callable[[Results], Block]] = {"sim-figures": figures}
