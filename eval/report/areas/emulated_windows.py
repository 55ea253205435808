"""Windows of real traffic on an emulated cluster: every way, and what ``ppd`` costs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...compare import family
from ...compare.verdict import judged, measured
from ..parts import Block, Table, block, percent, short
from ..real_traffic import cost_of_ppd
from ..results import Results

# Raw rows of each link.
_FILES = ("compare-emulated.jsonl", "compare-emulated-25gbps.jsonl")
# No verdicts: how much two runs of one window differ was not measured.
_NAMED = {"beats": "lower", "ties": "tie", "loses": "higher"}


def _judgements(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """What each window showed, by its name and link; those that every way has served."""
    return results.once("emulated windows", lambda: _corrected(list(_judged(results))))


def _corrected(judged: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    family.correct([judgement for _, judgement in judged])
    return judged


def _judged(results: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in _FILES:
        rows = results.rows(file)
        runs = rows.where(row="run").rows
        config = measured(runs)
        for trace in config.traces:
            link = runs[-1]["link_gbps"]
            yield f"{trace.name}, {link:g} Gb/s", judged(config, trace, rows.rows)


def ways(results: Results) -> Block:
    """Return TTFT and TPOT of every way, and the KV that it sent."""
    lines = [
        (
            name,
            f"`{way}`",
            f"{short(of['ttft_p50_ms'])} / {short(of['ttft_p90_ms'])}",
            f"{of['tpot_p50_ms']:.2f} / {of['tpot_p90_ms']:.2f}",
            percent(of["local_share"]),
            f"{of['kv_mb_moved'] / 1e3:.1f}",
            f"{of['failed']}",
        )
        for name, judgement in _judgements(results)
        for way, of in judgement["ways"].items()
    ]
    head = ("window", "policy", "TTFT p50 / p90", "TPOT p50 / p90", "local", "KV, GB", "failed")
    return block(Table(head, lines, "later turns, ms"), made_of=_made_of(results))


def verdicts(results: Results) -> Block:
    """Return what ``ppd`` costs beside the best static policy."""
    lines = []
    for name, judgement in _judgements(results):
        for verdict in judgement["verdicts"]:
            costs, best = verdict["costs"], verdict["best_static"]
            low, high = verdict["interval"]
            lines.append(
                (
                    f"{name} ({judgement['compared_turns']} later turns)",
                    verdict["at"],
                    f"{cost_of_ppd(costs, verdict['weights']):.2f}",
                    f"{costs[best]:.2f} (`{best}`)",
                    f"{verdict['difference']:+.2f} [{low:+.2f}, {high:+.2f}]",
                    _NAMED[verdict["verdict"]],
                )
            )
    head = ("window", "at", "`ppd` 1:1", "best other", "difference [95 %]", "")
    caption = (
        "costs of the conversations that every policy served to their end; 95 %: bootstrap over "
        f"the conversations of one window; Holm's correction over these {len(lines)} comparisons"
    )
    return block(Table(head, lines, caption), made_of=_made_of(results))


def _made_of(results: Results) -> list[Any]:
    return [results.rows(file).where(row="run") for file in _FILES]


BLOCKS = {"emulated-windows": ways, "emulated-verdicts": verdicts}
