"""The sections of a report: from raw files to figures and tables.

Each is made of one file. Its text explains the figure; the figure comes from the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import check_figures, scenarios
from ..engine import interference
from . import figures as report_figures
from .parts import Content, Section, Table, section, short
from .policies import grid_sections
from .real_traffic import real_traffic
from .sources import (
    CheckRow,
    ClaimRow,
    InterferenceRow,
    ScenarioRow,
    Source,
    WeightsRow,
    read_source,
)


def sections(folder: Path) -> list[Section]:
    """Return all sections of the report, from the raw files of a folder.

    Raises:
        ConfigError: a raw file is broken.
    """
    return [
        real_traffic(folder),
        *grid_sections(folder),
        _interference(folder),
        _weights(folder),
        _scenarios(folder),
        _paper_winners(folder),
        _check(folder),
    ]


def _interference(folder: Path) -> Section:
    run = "ppd-eval bench interference --out results/interference.jsonl"
    source = read_source(folder, "interference.jsonl", InterferenceRow, run)

    def make(of: Source) -> Content:
        rounds: dict[int, set[int]] = {}
        for row in of.rows:
            rounds.setdefault(row["context"], set()).add(row["round"])
        cells = interference.summarize([dict(row) for row in of.rows])
        counts = {context: len(some) for context, some in rounds.items()}
        return report_figures.interference(cells, counts), ()

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

    def make(of: Source) -> Content:
        mixes: dict[str, dict[float, dict[str, float]]] = {}
        for row in of.rows:  # a weight that was measured twice: the newer row
            mixes.setdefault(row["mix"]["grid"], {})[row["w_ttft"]] = dict(row)
        series = {name: [rows[x] for x in sorted(rows)] for name, rows in mixes.items()}
        return report_figures.weights(series), ()

    return section(
        "weights",
        "What the weights move",
        "One cluster, one table, the same traffic; only the weights that requests bring differ. "
        "Each curve is a mix of workloads, named after the grid that it is drawn from. One run a "
        "point: the share of local turns is the table's, latencies carry noise.",
        source,
        make,
    )


def _scenarios(folder: Path) -> Section:
    run = "make scenarios RECORD=results/scenarios.jsonl"
    source = read_source(folder, "scenarios.jsonl", ScenarioRow, run)

    def make(of: Source) -> Content:
        cells = scenarios.summarize(of.rows)
        all_turns = sorted({cell["turns"] for cell in cells})
        tables = []
        for turns in all_turns:
            later = turns > 1
            head: tuple[str, ...] = ("scenario", "side", "wall s", "tokens/s", "TTFT", "p90")
            head += (("T2+ TTFT",) if later else ()) + ("TPOT", "ITL p99", "E2E", "failed")
            keys: tuple[str, ...] = ("wall_s", "tokens_per_s", "ttft_ms", "ttft_p90_ms")
            keys += (("later_ttft_ms",) if later else ()) + ("tpot_ms", "itl_p99_ms", "e2e_ms")
            rows = [
                (
                    cell["scenario"],
                    cell["side"],
                    *(short(cell[key]) for key in keys),
                    f"{cell['failed']}",
                )
                for cell in cells
                if cell["turns"] == turns
            ]
            caption = (
                "single turns, as in the post" if turns == 1 else f"{turns} turns a conversation"
            )
            tables.append(Table(head, rows, f"{caption}; ms, means, medians over rounds"))
        return None, (_against_post(cells), *tables)

    return section(
        "scenarios",
        "Six scenarios, monolithic against disaggregated",
        "The workloads of a post on NanoGPT, its token counts multiplied. 1R: one worker with "
        "chunked prefill mixed into its decodes, on one core. 2R: two such, so the cores that pd "
        "and ppd have for one prefill and one decode worker. The post compared on one device. "
        "All requests come at once, except the staggered ones (0.1 s apart; in the post they "
        "come at once, too).",
        source,
        make,
    )


def _against_post(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Of single turns: throughput, TTFT, latency as multiples of the monolithic side's."""
    to_one, to_two = (
        scenarios.ratios(cells, 1, scenarios.PD.name, base.name, scenarios.RATIOS)
        for base in (scenarios.ONE, scenarios.TWO)
    )

    def as_text(of: tuple[float, ...] | None) -> str:
        return "-" if of is None else " / ".join(f"{value:.2f}" for value in of)

    rows = [
        (name, as_text(scenarios.POST[name]), as_text(to_one.get(name)), as_text(to_two.get(name)))
        for name in scenarios.NAMES
    ]
    head = ("scenario", "the post", "pd / 1R (twice the cores)", "pd / 2R (equal cores)")
    return Table(head, rows, "disaggregated / monolithic: tokens/s, TTFT, latency")


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
        return None, (Table(head, rows, "percent of the points; stated → simulated"),)

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
