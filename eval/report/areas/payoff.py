"""Every policy on simulated clusters at true lengths, and what a clairvoyant would win."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...compare import family
from ...compare.config import BASE, FULL_TRANSFER, PPD, REPLICA
from ...compare.kept import machine_of, newest
from ..parts import Block, Table, block, change, percent, short
from ..results import Results, Rows

_WEIGHTS = "1:1"
_OVERLOAD = "overloaded prefill"  # a trace; TPOT there is low where the decode worker is idle
_CONTESTED = ("mixed", _OVERLOAD, "large batches", "contexts of 32k")
_RATES = "slower machines serve contested traffic at lower rates"
_SHOWN = {  # ways, as heads of columns
    f"{PPD} {_WEIGHTS}": "`ppd`",
    REPLICA: "2 replicas",
    FULL_TRANSFER: "full transfer",
    BASE: "delta transfer",
    "full": "`full`",
    "threshold": "`threshold`",
    "threshold:uncached=512": "llm-d's",
}


def _rows(results: Results) -> tuple[Rows, list[dict[str, Any]]]:
    """Return the newest rows of each traffic and machine, and their verdicts, all together."""
    every = results.rows("payoff.jsonl")
    rows = Rows(every.file, tuple(newest(every)), every.headers)
    judgements = [copy.deepcopy(dict(row)) for row in rows]
    family.correct(judgements)
    return rows, judgements


def traffic(results: Results) -> Block:
    """Return what the traffic was: where lengths and times come from, and how it was sampled."""
    rows, judgements = _rows(results)
    first = machine_of(judgements[0])
    shown = {one["trace"]: one["asked"] for one in judgements if machine_of(one) == first}
    table = [
        (
            _name(one, first),
            "synthetic" if _is_synthetic(one["asked"]["workload"]) else "1.0",
            *_arrivals(one["asked"]),
            _conversations(one),
            f"{one['conversations']:,}",
            f"{one['later_turns']:,}",
            f"{one['ways'][BASE]['decode_batch']:.0f}",
        )
        for one in judgements
        if machine_of(one) == first or one["asked"] != shown.get(one["trace"])
    ]
    head = ("traffic", "lengths", "arrivals", "pauses", "conversations x windows")
    sums = ("of these with later turns", "later turns", "decode at once")
    caption = (
        "scaling of lengths: 1.0 are a trace's own; drawn: with replacement; "
        f"{_profile(judgements)}; "
        f"what decodes at once is the mean with delta transfer; {first} where no machine is named"
    )
    return block(Table((*head, *sums), table, caption), made_of=[rows])


def _conversations(judgement: Mapping[str, Any]) -> str:
    windows = judgement["windows"]
    # Rows of earlier commits have only what was asked for; a window may hold fewer.
    asked = windows * judgement["asked"]["conversations"]
    planned = judgement.get("planned_conversations") or asked
    return f"{planned / windows:.0f} x {windows}"


def _name(judgement: Mapping[str, Any], first: str) -> str:
    """Name the traffic, with its machine if that is not the first one."""
    machine = machine_of(judgement)
    return judgement["trace"] if machine == first else f"{judgement['trace']}, {machine}"


def times(results: Results) -> Block:
    """Return TTFT of later turns by policy."""
    rows, judgements = _rows(results)
    return block(_times_table(judgements), made_of=[rows])


def _times_table(judgements: Sequence[Mapping[str, Any]]) -> Table:
    table = []
    for one in judgements:
        ways = one["ways"]
        cells = (
            f"{short(ways[n]['ttft_p50_ms'])} / {short(ways[n]['ttft_p90_ms'])}" for n in _SHOWN
        )
        table.append((one["trace"], machine_of(one), *cells))
    caption = f"TTFT of later turns, p50 / p90, ms; {_RATES}; {_profile(judgements)}"
    return Table(("traffic", "link", *_SHOWN.values()), table, caption)


def _is_synthetic(workload: str) -> bool:
    return "{" not in workload


def _arrivals(asked: Mapping[str, Any]) -> tuple[str, str]:
    """Arrivals and pauses of a trace."""
    thinks = re.findall(r"think_s=(\d+)", " ".join((asked["workload"], *asked["also"])))
    drawn = f"drawn, mean {thinks[0]} s" if thinks else ""
    pauses = "its own" if not drawn else f"its own; {drawn}" if asked["also"] else drawn
    if asked["poisson"]:
        return f"Poisson, {asked['qps']:g}/s, drawn", pauses
    return f"its own, every {asked['every']}th session", pauses


def _profile(judgements: Sequence[Mapping[str, Any]]) -> str:
    """Name what was simulated."""
    row = judgements[0]
    commits = sorted({commit[:7] for one in judgements for commit in one["raw_commits"]})
    return f"simulator of {', '.join(commits)}, profile {row['profile']}, `{row['shape']}`"


def verdicts(results: Results) -> Block:
    """Return what ``ppd`` and the clairvoyant cost beside the best static policy."""
    rows, judgements = _rows(results)
    return block(_verdict_table(judgements), _sums(judgements), made_of=[rows])


def tables(results: Results) -> tuple[Table, ...]:
    """Return what the report shows of the study."""
    _, judgements = _rows(results)
    return _times_table(judgements), _verdict_table(judgements), _sums(judgements)


def _verdict_table(judgements: Sequence[dict[str, Any]]) -> Table:
    table = []
    for one in judgements:
        (each,) = (v for v in one["verdicts"] if (v["at"], v["weights"]) == ("each", _WEIGHTS))
        best = each["costs"][each["best_static"]]
        counted = Counter(verdict["verdict"] for verdict in one["verdicts"])
        table.append(
            (
                one["trace"],
                machine_of(one),
                f"`{each['best_static']}` {best:.3f}",
                f"{each['costs'][f'{PPD} {_WEIGHTS}']:.3f}",
                *_foreseen(each),
                f"{counted['beats']}, {counted['ties']}, {counted['loses']}",
                _kv(one["ways"]),
            )
        )
    head = ("traffic", "link", "best static", "`ppd`")
    won = ("foresight wins", "a clairvoyant", "`ppd` there")
    caption = (
        "cost at even weights, geometric mean over turns: delta transfer costs 2; wins, ties and "
        f"losses of `ppd` in {len(judgements[0]['verdicts'])} comparisons; KV moved by `ppd` "
        "against delta transfer; a tie: what foresight wins or loses may be chance; "
        f"{_RATES}; {_profile(judgements)}"
    )
    return Table((*head, *won, "wins, ties, losses", "KV"), table, caption)


def targets(results: Results) -> Block:
    """Return the shares of later turns that miss a target."""
    rows, judgements = _rows(results)
    table = []
    asked: list[str] = []
    for one in judgements:
        missed = [verdict for verdict in one["verdicts"] if verdict["at"] == "missed"]
        asked = [verdict["weights"] for verdict in missed]
        table.append((one["trace"], machine_of(one), *map(_missed, missed)))
    caption = (
        "later turns that miss a target of TTFT / TPOT: with the best static policy, with `ppd`; "
        f"{_profile(judgements)}"
    )
    return block(Table(("traffic", "link", *asked), table, caption), made_of=[rows])


def _missed(verdict: Mapping[str, Any]) -> str:
    costs, best = verdict["costs"], verdict["best_static"]
    ours = costs[f"{PPD} {verdict['weights']}"]
    return f"`{best}` {_tenths(costs[best])}, {_tenths(ours)}"


def _tenths(share: float) -> str:
    return f"{100 * share:.1f} %"


def _foreseen(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    """What foresight alone wins, then the clairvoyant, and ``ppd`` in the same windows."""
    if (foreseen := verdict.get("foreseen")) is None:
        return "-", "-", "-"
    best = foreseen["best"]
    alone = "-"  # rows of earlier commits have the clairvoyant only
    if "verdict" in foreseen:
        tie = ", a tie" if foreseen["verdict"] == "ties" else ""
        alone = f"{_tenths(1 - foreseen['foresight'] / best)}{tie}"
    clairvoyant = _tenths(1 - family.clairvoyant(foreseen) / best)
    return alone, clairvoyant, _tenths(1 - foreseen["ppd"] / best)


def _sums(judgements: Sequence[dict[str, Any]]) -> Table:
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in judgements:
        groups.setdefault(one["trace"], []).append(one)
    for one in judgements:
        groups.setdefault(machine_of(one), []).append(one)
    parts = {
        "mixed and contested": [one for one in judgements if one["trace"] in _CONTESTED],
        f"all but {_OVERLOAD}": [one for one in judgements if one["trace"] != _OVERLOAD],
    }
    groups |= {name: part for name, part in parts.items() if part}
    lines = [_sum(name, of_one) for name, of_one in (*groups.items(), ("all", judgements))]
    head = ("traffic or machine", "comparisons", "wins", "ties", "losses")
    won = ("foresight's wins", "clairvoyant's gain", "`ppd`'s share of it", "A/A ties")
    caption = (
        "sums of these, by traffic, and once more by machine, after Holm's correction of all; "
        "foresight's wins are in the mean at even weights"
    )
    return Table((*head, *won), lines, caption)


def _sum(name: str, judgements: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    summary = family.summary(judgements)
    return (
        name,
        f"{summary['comparisons']}",
        f"{summary['wins']}",
        f"{summary['ties']}",
        f"{summary['losses']}",
        summary["clairvoyant_wins"] or "-",
        *_won(summary["clairvoyant_gain"], summary["clairvoyant_share"]),
        summary["a_a_ties"],
    )


def _won(gain: float | None, share: float | None) -> tuple[str, str]:
    """What the clairvoyant wins, and ``ppd``'s share; it may not have been simulated."""
    if gain is None:
        return "-", "-"
    return _tenths(gain), "nothing to win" if share is None else percent(share)


def _kv(ways: Mapping[str, Any]) -> str:
    base = ways[BASE]["kv_mb_moved"]
    return change(ways[f"{PPD} {_WEIGHTS}"]["kv_mb_moved"] / base) if base else "-"


def _count(name: str) -> Callable[[Results], str]:
    return lambda results: f"{family.summary(_rows(results)[1])[name]}"


NUMBERS = {f"payoff-{name}": _count(name) for name in ("wins", "ties", "losses")}
BLOCKS: dict[str, Callable[[Results], Block]] = {
    "payoff-traffic": traffic,
    "payoff-times": times,
    "payoff-targets": targets,
    "payoff-verdicts": verdicts,
}
