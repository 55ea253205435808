"""The simulator against measurements and the paper's numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...simulation.cost_model import VLLM_H100
from ..parts import PAPER_MACHINE, Block, Table, block, short
from ..results import Results, Row, Rows

_FAR = 0.2  # an error that a reader should see
_METRICS = {
    "t1_ttft_ms": "T1 TTFT mean, ms",
    "t1_ttft_p50_ms": "T1 TTFT p50, ms",
    "t2_ttft_ms": "T2 TTFT mean, ms",
    "t2_ttft_p50_ms": "T2 TTFT p50, ms",
    "t1_tpot_p50_ms": "T1 TPOT p50, ms",
    "tpot_ms": "TPOT mean, ms",
    "tokens_per_s": "tokens/s",
}


# Where the paper's v2 has a group of claims, by how the group's name begins.
_PLACES = {
    "T2 TTFT": "Table 1",
    "wins by": "Table 2",
    "workloads that fail": "Table 5",
    "TPOT beside prefill": "Figures 2, 7, 8",
    "local turns": "section 6.5",
    "KV moved": "section 6.2",
}


def _last_run(results: Results, name: str, kind: str) -> tuple[Rows, Rows]:
    """Return the rows of one kind of a file's last run, and the row that ends the run."""
    rows = results.rows(name)
    ends = [number for number, row in enumerate(rows) if row["row"] == "run"]
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    run = Rows(rows.file, rows.rows[begin : ends[-1] + 1], (rows.rows[ends[-1]],))
    return run.where(row=kind), run.where(row="run")


def calibration(results: Results) -> Block:
    """Return the fitted parameters of the paper's machine, and how well they meet their points."""
    rows, run = _last_run(results, "simulate-paper.jsonl", "measured")
    fitted = rows.where(calibration=True)
    table = [
        ("compute", f"{100 * VLLM_H100.compute_share:g} % of the peak"),
        ("memory", f"{100 * VLLM_H100.memory_share:g} % of the peak"),
        ("a step", f"{VLLM_H100.step_ms:g} ms"),
        ("a sequence in a step", f"{VLLM_H100.sequence_ms:g} ms"),
        ("a request", f"{VLLM_H100.request_ms:g} ms"),
        ("a transfer", f"{VLLM_H100.handover_ms:g} ms"),
        ("the link", f"{VLLM_H100.link_bytes_per_s / 1e9:g} GB/s"),
        (f"largest error at the {len(fitted)} points", f"{100 * max(map(_off, fitted)):.1f} %"),
    ]
    caption = "`VLLM_H100` in `eval/simulation/cost_model.py`, fitted to measured points"
    return block(Table(("parameter", "value"), table, caption), made_of=[run])


def _off(row: Row) -> float:
    return abs(float(row["simulated"] / row["value"] - 1))


def points(results: Results) -> Block:
    """Return measured points that the fit did not see, beside the simulated ones."""
    rows, run = _last_run(results, "simulate-paper.jsonl", "measured")
    table = []
    for row in rows.where(calibration=False):
        off = row["simulated"] / row["value"] - 1
        text = f"{100 * off:+.0f} %"
        table.append(
            (
                f"{row['configuration']} {row['workload']} {row['qps']:g}",
                _METRICS[row["metric"]],
                short(row["value"]),
                short(row["simulated"]),
                f"**{text}**" if abs(off) > _FAR else text,
            )
        )
    head = ("configuration, workload, QPS", "", "measured", "simulated", "off")
    return block(Table(head, table, PAPER_MACHINE), made_of=[run])


def _is_local(row: Row) -> bool:
    return "pD" in row["configuration"] or row["configuration"].endswith("R")


_KINDS: dict[str, Callable[[Row], bool]] = {
    "TTFT of local and replica turns": lambda r: "t2_ttft" in r["metric"] and _is_local(r),
    "TTFT of remote turns": lambda r: "t2_ttft" in r["metric"] and not _is_local(r),
    "TTFT of first turns that wait for a connection": lambda r: "t1_ttft" in r["metric"],
    "TPOT": lambda r: "tpot" in r["metric"],
    "tokens/s": lambda r: r["metric"] == "tokens_per_s",
}


def errors(results: Results) -> Block:
    """Return the errors of the predicted points, by what was predicted."""
    rows, run = _last_run(results, "simulate-paper.jsonl", "measured")
    predicted = rows.where(calibration=False)
    table = []
    for name, wanted in _KINDS.items():
        offs = [row["simulated"] / row["value"] - 1 for row in predicted if wanted(row)]
        sizes = [abs(off) for off in offs]
        told = (statistics.median(sizes), max(sizes))
        bias = f"{100 * statistics.median(offs):+.0f} %"
        table.append((name, f"{len(offs)}", *(f"{100 * size:.0f} %" for size in told), bias))
    head = ("predicted", "points", "median error", "largest", "bias")
    return block(Table(head, table, PAPER_MACHINE), made_of=[run])


def claims(results: Results) -> Block:
    """Return the paper's numbers beside the simulated ones."""
    stated, run = _last_run(results, "simulate-paper.jsonl", "claim")
    found, open_run = _last_run(results, "simulate-paper-open.jsonl", "claim")
    well = {(row["group"], row["name"]): row["simulated"] for row in found}
    places = {name: place for place, name in enumerate(dict.fromkeys(stated.values("group")))}
    table, group = [], ""
    for row in sorted(stated, key=lambda row: places[row["group"]]):
        simulated, difference = row["simulated"], row["difference"]
        open_loop = well.get((row["group"], row["name"]))
        # These two do not depend on how the load is made.
        if row["group"].startswith("TPOT beside"):
            open_loop = None
        table.append(
            (
                _in_the_paper(row["group"]) if row["group"] != group else "",
                row["name"],
                f"{row['paper']:g}",
                "-" if simulated is None else f"{simulated:.1f}",
                "-" if difference is None else f"{difference:+.1f}",
                "" if open_loop is None else f"{open_loop:.1f}",
            )
        )
        group = row["group"]
    head = ("", "", "paper", "simulated", "difference", "measured well")
    return block(Table(head, table, PAPER_MACHINE), made_of=[run, open_run])


def _in_the_paper(group: str) -> str:
    """Name a group of claims with its place in the paper."""
    places = (place for start, place in _PLACES.items() if group.startswith(start))
    place = next(places, None)
    return group if place is None else f"{group} ({place})"


def interference(results: Results) -> Block:
    """Return the paper's Figures 2 and 7, simulated, beside its authors' earlier run."""
    rows, run = _last_run(results, "simulate-paper.jsonl", "curve")
    table = []
    for figure, name in (("2", "1 prefill"), ("7", "4 prefills")):
        drawn = rows.where(figure=figure)
        prefills = drawn.rows[0]["prefills"]
        for (batch,), of in drawn.groups("batch").items():
            earlier = rows.where(figure="earlier run", prefills=prefills, batch=batch)
            table.append((name, f"{batch}", *_slowdowns(of), *_slowdowns(earlier, told=True)))
    for (context,), of in rows.where(figure="8").groups("context").items():
        table.append((f"1 prefill, contexts of {context:,}", "64", *_slowdowns(of), *["-"] * 4))
    head = ("beside", "batch", "append", "full", "append, read once", "full, read once")
    more = ("earlier run: append", "full", "measured: append", "full")
    caption = (
        "growth of the batch's TPOT, simulated with contexts of its own, and with one context that "
        "is read once; prefills of 1,024 tokens; the earlier run appended 128, simulated with one "
        f"context; {PAPER_MACHINE}"
    )
    return block(Table((*head, *more), table, caption), made_of=[run])


def _slowdowns(rows: Rows, *, told: bool = False) -> list[str]:
    """Return the growth beside appends and full prefills; of the earlier run also the measured."""

    def percent(key: str, *, full: bool, shared: bool) -> str:
        (row,) = rows.where(full=full, shared=shared).rows
        return f"{100 * row[key]:+,.0f} %"

    if told:
        simulated = [percent("slowdown", full=full, shared=True) for full in (False, True)]
        return simulated + [percent("measured", full=full, shared=True) for full in (False, True)]
    return [
        percent("slowdown", full=full, shared=shared)
        for shared in (False, True)
        for full in (False, True)
    ]


def cpu(results: Results) -> Block:
    """Return how far the simulator is from the sweep of a real CPU cluster."""
    rows = results.rows("simulate-cpu.jsonl")
    run = rows.pick(lambda row: "cells" in row, "a summary").newest()
    last = run.rows[-1]
    table = []
    for part, name in (("quiet", "quiet (fitted)"), ("remote", "remote"), ("local", "local")):
        for metric, title in (
            ("first_ttft_ms", "TTFT of first turns"),
            ("ttft_ms", "TTFT of later turns"),
            ("tpot_ms", "TPOT"),
        ):
            table.append((name, title, *_errors(last[part][metric], " %")))
    table.append(("TTFT saved by local turns", "", *_errors(last["ttft_saved_off_points"], " pp")))
    table.append(("cells with the same choice", "", last["same_choice"], "", ""))
    head = ("", "", "median error", "largest", "bias")
    return block(
        Table(head, table, "errors of the simulation; pp are percentage points"), made_of=[run]
    )


def _errors(of: dict[str, float], unit: str) -> Sequence[str]:
    return (f"{of['median']:.1f}{unit}", f"{of['largest']:.1f}{unit}", f"{of['bias']:+.1f}{unit}")


def speed(results: Results) -> Block:
    """Return how long the simulator takes."""
    table, used = [], []
    for name, what in (
        ("simulate-paper.jsonl", "the paper's grid, its load generator"),
        ("simulate-paper-open.jsonl", "the paper's grid, open loop"),
    ):
        _, run = _last_run(results, name, "point")
        row = run.rows[-1]
        used.append(run)
        size = (f"{row['points']:,}", f"{row['turns']:,}")
        table.append((what, *size, f"{row['processes']}", f"{row['wall_s']:.0f}"))
    head = ("", "points", "turns", "processes", "wall time, s")
    return block(Table(head, table, PAPER_MACHINE), made_of=used)


BLOCKS = {
    "sim-calibration": calibration,
    "sim-points": points,
    "sim-errors": errors,
    "sim-claims": claims,
    "sim-interference": interference,
    "sim-cpu": cpu,
    "sim-speed": speed,
}
