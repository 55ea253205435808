"""The six scenarios, monolithic against disaggregated: a section of the report, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import scenarios
from .parts import Content, Section, Table, section, short
from .sources import ScenarioRow, Source, newest, read_source


def scenario_section(folder: Path) -> Section:
    """Return the section on the six scenarios.

    Raises:
        ConfigError: the raw file is broken.
    """
    run = "make scenarios RECORD=results/scenarios.jsonl"
    source = read_source(folder, "scenarios.jsonl", ScenarioRow, run)

    def make(whole: Source) -> Content:
        of = newest(whole, "commit")
        cells = scenarios.summarize(of.rows)
        all_turns = sorted({cell["turns"] for cell in cells})
        return None, (against_post(cells), *(by_turns(cells, turns) for turns in all_turns))

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


def by_turns(cells: Sequence[Mapping[str, Any]], turns: int) -> Table:
    """Return all sides of all scenarios, of conversations with so many turns."""
    later = turns > 1
    head: tuple[str, ...] = ("scenario", "side", "wall s", "tokens/s", "TTFT", "p90")
    head += (("T2+ TTFT",) if later else ()) + ("TPOT", "ITL p99", "E2E", "failed")
    keys: tuple[str, ...] = ("wall_s", "tokens_per_s", "ttft_ms", "ttft_p90_ms")
    keys += (("later_ttft_ms",) if later else ()) + ("tpot_ms", "itl_p99_ms", "e2e_ms")
    rows = [
        (cell["scenario"], cell["side"], *(short(cell[key]) for key in keys), f"{cell['failed']}")
        for cell in cells
        if cell["turns"] == turns
    ]
    caption = "single turns, as in the post" if turns == 1 else f"{turns} turns a conversation"
    return Table(head, rows, f"{caption}; ms, means, medians over rounds")


def against_post(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return throughput, TTFT and latency of single turns as multiples of the monolithic side's."""
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
