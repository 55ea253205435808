"""The report's section of what ``ppd-eval compare`` measured on real traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compare.verdict import judged, measured
from . import study_figures as report_figures
from .parts import Content, Section, Table, percent, section, short
from .results import Results
from .sources import CompareRow, read_source

_RUN = "ppd-eval compare eval/compare/public.toml --out results/compare.jsonl --data ..."


def real_traffic(results: Results) -> Section:
    """Return the section on every policy on real traffic.

    Raises:
        ConfigError: the raw file is broken.
    """
    return section(
        "real-traffic",
        "Real traffic",
        "Windows of three public traces, every policy on the same ones. They are scaled to two "
        "cores: fewer tokens, shorter pauses, other rates (TABLES.md). A cost is w_ttft * TTFT / "
        "TTFT_pd + w_tpot * TPOT / TPOT_pd of later turns. A line is what ppd costs more or less "
        "than the best of the other policies on the same cluster, with its 95 % interval "
        "(bootstrap over seeds and whole conversations): left of zero ppd is better, across it "
        "is a tie. replica, two workers that do both, is another cluster, shown for information.",
        read_source(results.folder, "compare.jsonl", CompareRow, _RUN),
        lambda _: _content(judgements(results)),
    )


def judgements(results: Results) -> list[dict[str, Any]]:
    """Return what each trace showed, of the seeds that every policy has.

    Raises:
        ConfigError: the raw file is missing or incomplete.
    """
    return results.once("judgements", lambda: _judged(results.rows("compare.jsonl").rows))


def _judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    config = measured([row for row in rows if row["row"] == "run"])
    return [judged(config, trace, rows) | {"seeds": len(trace.seeds)} for trace in config.traces]


def _content(judged_traces: Sequence[Mapping[str, Any]]) -> Content:
    tables = [_ways(judgement) for judgement in judged_traces] + [
        _verdicts(judgement) for judgement in judged_traces
    ]
    return lambda: report_figures.verdicts(judged_traces), tuple(tables)


def _ways(judgement: Mapping[str, Any]) -> Table:
    head: tuple[str, ...] = (
        "policy",
        "T2+ TTFT p50",
        "p90",
        "TPOT p50",
        "p90",
        "local",
        "tokens cached",
    )
    head += ("KV sent, MB", "failed")
    rows = [
        (
            name,
            *(short(way[key]) for key in ("ttft_p50_ms", "ttft_p90_ms")),
            *(short(way[key]) for key in ("tpot_p50_ms", "tpot_p90_ms")),
            percent(way["local_share"]),
            f"{way['cached_tokens']:,}",
            short(way["kv_mb_moved"]),
            f"{way['failed']}",
        )
        for name, way in judgement["ways"].items()
    ]
    return Table(head, rows, f"{judgement['trace']}: {judgement['later_turns']} later turns; ms")


def _verdicts(judgement: Mapping[str, Any]) -> Table:
    head = ("weights", "at", "ppd", "best other", "its cost", "difference", "95 %", "ppd")
    rows = [
        (
            verdict["weights"],
            verdict["at"],
            short(cost_of_ppd(verdict["costs"], verdict["weights"])),
            verdict["best_static"],
            short(verdict["costs"][verdict["best_static"]]),
            f"{verdict['difference']:+.3g}",
            _interval(verdict["interval"]),
            verdict["verdict"],
        )
        for verdict in judgement["verdicts"]
    ]
    return Table(head, rows, f"{judgement['trace']}: costs, {judgement['seeds']} seeds")


def cost_of_ppd(costs: Mapping[str, float], weights: str) -> float:
    """Return what ``ppd`` costs at some weights."""
    return costs[f"ppd {weights}"]


def _interval(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{low:+.3g} to {high:+.3g}"
