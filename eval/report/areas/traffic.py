"""Policies on real traffic, over load, and in six scenarios; the load generator checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import check_figures, scenarios
from ...compare.config import BASE, FULL_TRANSFER, REPLICA
from ...compare.verdict import change as measured_change
from ...compare.verdict import measured
from ...policies import cells as grid_cells
from ..parts import Block, Table, block, change, percent, short, spread
from ..real_traffic import cost_of_ppd, judgements
from ..results import Results, Row, Rows
from ..scenarios import against_post

_COMPARED = "compare.jsonl"
_OURS = "ppd 1:1"
_METRICS = ("ttft_p50", "ttft_p90", "tpot_p50")


def _runs(results: Results) -> Rows:
    return results.rows(_COMPARED).where(row="run")


def windows(results: Results) -> Block:
    """Return what was made of each trace: how much of it, and how it was scaled."""
    runs = _runs(results)
    table = []
    for judgement in judgements(results):
        of = runs.where(trace=judgement["trace"], way=BASE)
        asked: Mapping[str, Any] = of.rows[-1]["asked"]
        table.append(
            (
                judgement["trace"],
                f"{len(set(of.values('seed')))} x {asked['conversations']}",
                f"{judgement['later_turns']}",
                f"x {asked['scale']:g}",
                _pauses(asked["workload"]),
                f"{asked['qps']:g} a second" + ", Poisson" * asked["poisson"],
            )
        )
    head = ("trace", "windows x conversations", "later turns", "tokens", "pauses", "starts")
    return block(Table(head, table), made_of=[runs])


def _pauses(workload: str) -> str:
    if found := re.search(r"faster=([\d.]+)", workload):
        return f"the trace's / {found[1]}"
    if found := re.search(r"think_s=([\d.]+)", workload):
        return f"drawn, mean {found[1]} s"
    return "the trace's"


def saved(results: Results) -> Block:
    """Return what ``ppd`` changes of later turns, against delta and full transfer."""
    rows = results.rows(_COMPARED)
    config = measured(_runs(results).rows)
    table = []
    for trace in config.traces:
        for base, name in ((BASE, "delta transfer"), (FULL_TRANSFER, "full transfer")):
            found = measured_change(config, trace, rows.rows, _OURS, base)
            cells = (_change(*found[metric]) for metric in _METRICS)
            runs = _runs(results).where(trace=trace.name)
            kv = _kv(runs.where(way=_OURS), runs.where(way=base), trace.seeds)
            table.append((trace.name, name, *cells, kv))
    head = ("trace", "against", "TTFT p50", "TTFT p90", "TPOT p50", "KV moved")
    caption = (
        "later turns of `ppd` at weights 1:1 [95 % interval]; a tie where the interval holds 0; "
        "KV: all windows (lowest to highest window)"
    )
    return block(Table(head, table, caption), made_of=[_runs(results)])


def _kv(mine: Rows, base: Rows, seeds: Sequence[int]) -> str:
    """Return what less or more of KV was moved, in all, and in the windows."""
    moved, others = (
        {row["seed"]: row["kv_bytes_moved"] for row in side if row["seed"] in seeds}
        for side in (mine, base)
    )
    windows = [100 * (moved[seed] / others[seed] - 1) for seed in seeds]
    whole = change(sum(moved.values()) / sum(others.values()))
    return f"{whole} ({min(windows):+.0f} to {max(windows):+.0f})"


def _change(ratio: float, low: float, high: float) -> str:
    tie = ", tie" if low <= 1 <= high else ""
    return f"{change(ratio)} [{100 * (low - 1):+.0f}, {100 * (high - 1):+.0f}]{tie}"


def verdicts(results: Results) -> Block:
    """Return what ``ppd`` costs beside the best static policy of the same cluster."""
    table = []
    for judgement in judgements(results):
        for verdict in judgement["verdicts"]:
            costs, best = verdict["costs"], verdict["best_static"]
            low, high = verdict["interval"]
            table.append(
                (
                    judgement["trace"],
                    verdict["weights"],
                    verdict["at"],
                    f"{cost_of_ppd(costs, verdict['weights']):.2f}",
                    f"{costs[best]:.2f} (`{best}`)",
                    f"{verdict['difference']:+.2f} [{low:+.2f}, {high:+.2f}]",
                    _VERDICTS[verdict["verdict"]],
                    f"{costs[REPLICA]:.2f}",
                )
            )
    head = ("trace", "weights", "at", "`ppd`", "best other", "difference [95 %]", "", "`replica`")
    return block(Table(head, table), made_of=[_runs(results)])


_VERDICTS = {"beats": "**wins**", "ties": "tie", "loses": "**loses**"}


def tally(results: Results) -> Block:
    """Return how often ``ppd`` wins, ties and loses, by trace."""
    runs = _runs(results)
    table = []
    for judgement in judgements(results):
        of = judgement["verdicts"]
        counted = Counter(verdict["verdict"] for verdict in of)
        cheaper = sum(
            verdict["costs"][REPLICA] < cost_of_ppd(verdict["costs"], verdict["weights"])
            for verdict in of
        )
        failed = sum(way["failed"] for way in judgement["ways"].values())
        counts = (counted[name] for name in ("beats", "ties", "loses"))
        line = (len(of), *counts, cheaper, failed)
        table.append((judgement["trace"], *(f"{number}" for number in line)))
    sums = (sum(int(line[i]) for line in table) for i in range(1, 7))
    table.append(("all", *(f"{total}" for total in sums)))
    head = ("trace", "comparisons", "wins", "ties", "losses", "`replica` costs less")
    caption = (
        "`ppd` against the best static policy of the same cluster, at three weightings, p50 and p90"
    )
    return block(Table((*head, "failed turns"), table, caption), made_of=[runs])


def overload(results: Results) -> Block:
    """Return all policies at the highest rate of the policy grid."""
    rows = results.rows("policy-grid.jsonl")
    rows = rows.where(grid=rows.rows[-1]["grid"])
    most = max(rows.values("qps"))
    rows = rows.where(qps=most)
    table = [
        (
            f"`{cell.side}`",
            *(spread(cell.values(metric)) for metric in grid_cells.METRICS[:5]),
            percent(cell.middle("local_share")),
        )
        for cell in grid_cells.summarize(rows)
    ]
    head = ("policy", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "tokens/s", "local")
    caption = f"{most:g} conversations a second; ms; medians over seeds (lowest to highest)"
    return block(Table(head, table, caption), made_of=[rows])


def post(results: Results) -> Block:
    """Return disaggregated serving as multiples of monolithic, beside what a post found."""
    rows = results.rows("scenarios.jsonl").newest()
    return block(against_post(scenarios.summarize(rows.rows)), made_of=[rows])


def two_turns(results: Results) -> Block:
    """Return TTFT of first and second turns and latency, of all sides of the scenarios."""
    rows = results.rows("scenarios.jsonl").newest().where(turns=2)
    cells = scenarios.summarize(rows.rows)
    sides = list(dict.fromkeys(cell["side"] for cell in cells))
    of = {(cell["scenario"], cell["side"]): cell for cell in cells}
    table = [
        (name, *(_two_turns(of[name, side]) for side in sides))
        for name in dict.fromkeys(cell["scenario"] for cell in cells)
    ]
    counts = sorted({cell["rounds"] for cell in cells})
    rounds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    caption = (
        "TTFT of first turns / TTFT of second turns / latency, in ms; means, medians of "
        f"{rounds} rounds"
    )
    return block(Table(("", *(f"`{side}`" for side in sides)), table, caption), made_of=[rows])


def _two_turns(cell: Mapping[str, Any]) -> str:
    return " / ".join(f"{cell[key]:,.0f}" for key in ("ttft_ms", "later_ttft_ms", "e2e_ms"))


def check_load(results: Results) -> Block:
    """Return our load generator beside AIPerf, on one server."""
    rows = results.rows("check-load.jsonl").where(row="run")
    table = [_check_line(row) for row in check_figures.compare(rows.rows)]
    head = ("load", "", "ours", "AIPerf", "difference by round", "above the engine: ours", "AIPerf")
    caption = (
        "medians over rounds, ms and tokens/s; differences: mean (lowest to highest), a tie where "
        "that holds 0"
    )
    return block(Table(head, table, caption), made_of=[rows])


def _check_line(row: Row) -> tuple[str, ...]:
    tie = ", tie" if row["least"] <= 0 <= row["most"] else ""
    above: Sequence[float] = row["above_engine_ms"] or ()
    return (
        row["kind"],
        row["metric"],
        short(row["ours"]),
        short(row["aiperf"]),
        f"{row['difference']:+.3g} ({row['least']:+.3g} to {row['most']:+.3g}){tie}",
        *([short(value) for value in above] or ["", ""]),
    )


def _verdict_count(name: str | None) -> Callable[[Results], str]:
    def count(results: Results) -> str:
        verdicts = [v["verdict"] for of in judgements(results) for v in of["verdicts"]]
        return f"{len(verdicts) if name is None else verdicts.count(name)}"

    return count


NUMBERS = {
    "traffic-comparisons": _verdict_count(None),
    "traffic-wins": _verdict_count("beats"),
    "traffic-ties": _verdict_count("ties"),
    "traffic-losses": _verdict_count("loses"),
}
BLOCKS = {
    "traffic-windows": windows,
    "traffic-saved": saved,
    "traffic-verdicts": verdicts,
    "traffic-tally": tally,
    "policy-overload": overload,
    "scenarios-post": post,
    "scenarios-two-turns": two_turns,
    "check-load": check_load,
}
