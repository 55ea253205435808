"""Every policy on simulated clusters at true lengths, and what a clairvoyant would win."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...compare import family
from ...compare.config import BASE, FULL_TRANSFER, PPD
from ..parts import Block, Table, block, change, percent, short
from ..results import Results, Rows

_WEIGHTS = "1:1"


def _rows(results: Results) -> tuple[Rows, list[dict[str, Any]]]:
    """Return the rows of the newest commit, and their verdicts, all together."""
    every = results.rows("payoff.jsonl")
    rows = every.newest()
    judgements = [copy.deepcopy(dict(row)) for row in rows]
    for one in judgements:
        _add_clairvoyant(one, every)
    family.correct(judgements)
    return rows, judgements


def _add_clairvoyant(judgement: dict[str, Any], every: Rows) -> None:
    """Add the clairvoyant's costs from an earlier run of the same windows, if it was left out.

    It does not depend on the policy ``ppd``. The windows are the same where all static policies
    cost the same.
    """
    for verdict in judgement["verdicts"]:
        for row in every:
            if _machine(row) != _machine(judgement) or row["trace"] != judgement["trace"]:
                continue
            for earlier in row["verdicts"]:
                if "clairvoyant" in earlier and _is_of_same_windows(earlier, verdict):
                    verdict.setdefault("clairvoyant", earlier["clairvoyant"])


def _is_of_same_windows(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if (one["weights"], one["at"]) != (other["weights"], other["at"]):
        return False
    static = {name for name in one["costs"] if not name.startswith(PPD)}
    return all(one["costs"][name] == other["costs"].get(name) for name in static)


def traffic(results: Results) -> Block:
    """Return what the traffic was, and TTFT of later turns by policy."""
    rows, judgements = _rows(results)
    table = []
    for one in judgements:
        ways = one["ways"]
        names = (FULL_TRANSFER, BASE, "full", "threshold", f"{PPD} {_WEIGHTS}")
        cells = (
            f"{short(ways[n]['ttft_p50_ms'])} / {short(ways[n]['ttft_p90_ms'])}" for n in names
        )
        sizes = (f"{one['conversations']:,}", f"{one['later_turns']:,}")
        table.append((one["trace"], _machine(one), *sizes, *cells))
    head = ("traffic", "link", "conversations", "later turns", "full transfer", "delta transfer")
    caption = "TTFT of later turns, p50 / p90, ms; conversations with a later turn, all windows"
    return block(Table((*head, "`full`", "`threshold`", "`ppd`"), table, caption), made_of=[rows])


def verdicts(results: Results) -> Block:
    """Return what ``ppd`` and the clairvoyant cost beside the best static policy."""
    rows, judgements = _rows(results)
    table = []
    for one in judgements:
        (each,) = (v for v in one["verdicts"] if (v["at"], v["weights"]) == ("each", _WEIGHTS))
        best = each["costs"][each["best_static"]]
        counted = Counter(verdict["verdict"] for verdict in one["verdicts"])
        table.append(
            (
                one["trace"],
                _machine(one),
                f"`{each['best_static']}` {best:.3f}",
                f"{each['costs'][f'{PPD} {_WEIGHTS}']:.3f}",
                *_foreseen(each, best),
                f"{counted['beats']}, {counted['ties']}, {counted['loses']}",
                _kv(one["ways"]),
            )
        )
    head = ("traffic", "link", "best static", "`ppd`", "clairvoyant", "to be won")
    caption = (
        "cost at even weights, mean over turns: delta transfer costs 2; wins, ties and losses of "
        f"`ppd` in {len(judgements[0]['verdicts'])} comparisons; KV moved by `ppd` against delta "
        "transfer"
    )
    return block(
        Table((*head, "wins, ties, losses", "KV"), table, caption),
        _sums(judgements),
        made_of=[rows],
    )


def _foreseen(verdict: Mapping[str, Any], best: float) -> tuple[str, str]:
    """The clairvoyant's cost, and what it wins."""
    if "clairvoyant" not in verdict:
        return "-", "-"
    return f"{verdict['clairvoyant']:.3f}", percent(1 - verdict["clairvoyant"] / best)


def _sums(judgements: Sequence[dict[str, Any]]) -> Table:
    summary = family.summary(judgements)
    line = (
        f"{summary['comparisons']}",
        f"{summary['wins']}",
        f"{summary['ties']}",
        f"{summary['losses']}",
        *_won(summary["clairvoyant_gain"], summary["clairvoyant_share"]),
        summary["a_a_ties"],
    )
    head = ("comparisons", "wins", "ties", "losses", "clairvoyant's gain", "`ppd`'s share of it")
    return Table((*head, "A/A ties"), [line], "all of them, after Holm's correction")


def _won(gain: float | None, share: float | None) -> tuple[str, str]:
    """What the clairvoyant wins, and ``ppd``'s share; it may not have been simulated."""
    if gain is None:
        return "-", "-"
    return percent(gain), "nothing to win" if share is None else percent(share)


def _machine(one: Mapping[str, Any]) -> str:
    slower = "" if one["calibration_factor"] == 1 else f", x {one['calibration_factor']:g}"
    return f"{one['link_gbps']:g} Gb/s{slower}"


def _kv(ways: Mapping[str, Any]) -> str:
    base = ways[BASE]["kv_mb_moved"]
    return change(ways[f"{PPD} {_WEIGHTS}"]["kv_mb_moved"] / base) if base else "-"


def _count(name: str) -> Callable[[Results], str]:
    return lambda results: f"{family.summary(_rows(results)[1])[name]}"


NUMBERS = {f"payoff-{name}": _count(name) for name in ("wins", "ties", "losses")}
BLOCKS: dict[str, Callable[[Results], Block]] = {
    "payoff-traffic": traffic,
    "payoff-verdicts": verdicts,
}
