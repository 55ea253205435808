"""The sections of a report: from raw files to figures and tables.

Each is made of one file. Its text explains the figure; the figure comes from the rows alone.
"""

from __future__ import annotations

from pathlib import Path

from .. import check_figures
from ..compare import kept
from ..engine import interference
from . import study_figures as report_figures
from .areas import payoff
from .parts import PAPER_MACHINE, Content, Section, Table, section, short
from .policies import grid_sections
from .real_traffic import real_traffic
from .results import Results
from .route_map import route_map
from .scenarios import scenario_section
from .sources import (
    CheckRow,
    ClaimRow,
    DemoRow,
    InterferenceRow,
    NotMeasured,
    Source,
    VerdictRow,
    WeightsRow,
    newest,
    read_source,
)


def sections(results: Results) -> list[Section]:
    """Return all sections of the report, from the raw files of a folder.

    Raises:
        ConfigError: a raw file is broken.
    """
    folder = results.folder
    return [
        _demo(folder),
        route_map(folder),
        _payoff(results),
        real_traffic(results),
        *grid_sections(folder),
        _interference(folder),
        _weights(folder),
        scenario_section(folder),
        _paper_winners(folder),
        _check(folder),
    ]


def _demo(folder: Path) -> Section:
    run = "make demo RECORD=results/demo.jsonl"
    source = read_source(folder, "demo.jsonl", DemoRow, run)

    def make(of: Source) -> Content:
        runs = [row for row in of.rows if row.get("delta_ttft_ms")]
        if not runs:
            return None, ()
        return lambda: report_figures.before_and_after(runs[-1]), ()

    return section(
        "demo",
        "A chat in three ways",
        "TTFT of each turn of the newest demo: later turns local, remote with delta transfer on "
        "the same workers, and remote after a flush, with a full prefill and a full transfer.",
        source,
        make,
    )


def _payoff(results: Results) -> Section:
    run = "ppd-eval compare eval/compare/simulated.toml --verdicts results/payoff.jsonl ..."
    shown = read_source(results.folder, "payoff.jsonl", VerdictRow, run)
    if not isinstance(shown, NotMeasured):
        shown = shown.only(kept.newest(shown.rows))
    return section(
        "payoff",
        "Does it pay?",
        "Every policy on the same simulated traffic, at true lengths (SIMULATOR.md). A cost is "
        "that of real traffic, below. Verdicts are against the best static policy on the same "
        "workers, after Holm's correction. The clairvoyant looks three seconds ahead.",
        shown,
        lambda _: (None, payoff.tables(results)),
    )


def _interference(folder: Path) -> Section:
    run = "ppd-eval bench interference --out results/interference.jsonl"
    source = read_source(folder, "interference.jsonl", InterferenceRow, run)

    def make(whole: Source) -> Content:
        of = newest(whole, "commit")
        rounds: dict[int, set[int]] = {}
        for row in of.rows:
            rounds.setdefault(row["context"], set()).add(row["round"])
        cells = interference.summarize([dict(row) for row in of.rows])
        counts = {context: len(some) for context, some in rounds.items()}
        return lambda: report_figures.interference(cells, counts), ()

    return section(
        "interference",
        "Decoding beside prefill",
        "What running decodes bear while a prefill of the whole context, or an append of 128 "
        "tokens to it, runs on the same worker in one chunk (bounded chunks, the default, are "
        "there to prevent this). Medians over rounds.",
        source,
        make,
    )


def _weights(folder: Path) -> Section:
    run = "ppd-eval table weights eval/sweep/cpu-weights.toml --out results/weights-cpu.jsonl"
    source = read_source(folder, "weights-cpu.jsonl", WeightsRow, run)

    def make(whole: Source) -> Content:
        of = newest(whole, "commit")
        mixes: dict[str, dict[float, dict[str, float]]] = {}
        for row in of.rows:  # a weight that was measured twice: the newer row
            mixes.setdefault(row["mix"]["grid"], {})[row["w_ttft"]] = dict(row)
        series = {name: [rows[x] for x in sorted(rows)] for name, rows in mixes.items()}
        return lambda: report_figures.weights(series), ()

    return section(
        "weights",
        "What the weights move",
        "One cluster, one table, the same traffic; only the weights that requests bring differ. "
        "Each curve is a mix of workloads, named after the grid that it is drawn from. One run a "
        "point: the share of local turns is the table's, latencies carry noise.",
        source,
        make,
    )


def _paper_winners(folder: Path) -> Section:
    run = "ppd-eval simulate paper --workloads FILE --out results/simulate-paper.jsonl"
    source = read_source(folder, "simulate-paper.jsonl", ClaimRow, run, only="claim")

    def make(of: Source) -> Content:
        wins: dict[str, dict[str, tuple[float, float | None]]] = {}
        for row in of.rows:
            if row["group"].startswith("wins by "):
                wins_by_way = wins.setdefault(row["group"].removeprefix("wins by "), {})
                wins_by_way[row["name"]] = row["paper"], row["simulated"]
        sides = list(dict.fromkeys(side for of_metric in wins.values() for side in of_metric))
        rows = [
            (metric, *(_paper_cell(of_side.get(side)) for side in sides))
            for metric, of_side in wins.items()
        ]
        head = ("wins by", *sides)
        caption = f"percent of the points; stated → simulated; {PAPER_MACHINE}"
        return None, (Table(head, rows, caption),)

    return section(
        "paper-winners",
        "The paper's winner table, simulated",
        "Of 180 points (18 workloads, 10 rates) on four H100, how many each way of serving wins: "
        "as the PPD paper states, and as the simulator computes with the paper's load generator. "
        "docs/SIMULATOR.md lists what does not fit, and why.",
        source,
        make,
    )


def _paper_cell(of: tuple[float, float | None] | None) -> str:
    return "-" if of is None else f"{of[0]:g} → {short(of[1])}"


def _check(folder: Path) -> Section:
    source = read_source(
        folder,
        "check-load.jsonl",
        CheckRow,
        "make check-load RECORD=results/check-load.jsonl",
        only="run",
    )

    def make(of: Source) -> Content:
        rows = [
            (
                row["kind"],
                row["metric"],
                short(row["ours"]),
                short(row["aiperf"]),
                f"{row['difference']:+.3g}",
                f"{row['least']:+.3g} to {row['most']:+.3g}",
                f"{row['percent']:+.1f} %",
                "" if (above := row["above_engine_ms"]) is None else " / ".join(map(short, above)),
            )
            for row in check_figures.compare(of.rows)
        ]
        head = (
            "load",
            "",
            "ours",
            "AIPerf",
            "difference",
            "rounds",
            "",
            "above engine: ours / AIPerf",
        )
        return None, (Table(head, rows, "medians over rounds; ms and tokens/s"),)

    return section(
        "check-load",
        "The load generator against AIPerf",
        "The same lengths and times on the same server, in turn. Difference: ours less AIPerf's, "
        "mean over rounds and their range. Above engine: each client's mean less what SGLang "
        "itself measured while that client ran, medians over rounds; the rest of a difference is "
        "the engine's, which takes longer in one run than in another, and for a chat than for "
        "token ids.",
        source,
        make,
    )
