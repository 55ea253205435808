"""Which way was better on the same traffic, and how surely, from raw rows alone.

What a way costs is in ``costs``. All ways served the same conversations: one that a way did not
serve to its end counts for none. Confidence intervals come from drawing seeds again, and in each
whole conversations, the same for every way (paired bootstrap, 95 %). A seed is one run of each way.
Whatever else the machine did in that half minute affects all turns of the run; drawing
conversations alone would not show it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from ppd.errors import ConfigError
from ppd.score import Targets, Weights

from ..provenance import provenance
from ..raw_rows import append_whole
from . import family
from .config import AGAIN, BASE, CLAIRVOYANT, PPD, Comparison, Trace, seeds_of, ways
from .costs import (
    EACH,
    QUANTILES,
    Array,
    Counts,
    Place,
    Question,
    Sample,
    Turns,
    once,
    questions_of,
)
from .drive import read_rows
from .kept import kept_verdicts, machine_of
from .way import Way, label, parse

_DRAWS = 1000
_INTERVAL = (2.5, 97.5)


def run(config: Comparison, raw: Path, out: Path | None = None) -> int:
    """Print the tables and one JSON line.

    Args:
        raw: rows of a comparison, or verdicts that were kept.
        out: of a simulated cluster, the verdicts are appended here, one row for each trace, with
            the commits of the raw rows, and the digest of the table that ``ppd`` had in them.

    Raises:
        ConfigError: the file does not hold all runs.
    """
    if kept := kept_verdicts(raw):
        for judgement in kept:
            _print(judgement, f"{judgement['trace']}, {machine_of(judgement)}")
        print(json.dumps(family.summary(kept)))
        return 0
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_rows(raw):
        rows[row["trace"]].append(row)
    judgements = [judged(config, trace, rows[trace.name]) for trace in config.traces]
    if config.simulated is not None or config.emulated is not None:
        family.correct(judgements)
    for judgement in judgements:
        _print(judgement, judgement["trace"])
    summary = family.summary(judgements)
    if config.simulated is None:
        print(json.dumps({"traces": judgements, **summary}))
        return 0
    if out is not None:
        fields = ("shape", "horizon_s", "foreseen", "kv_events")
        about = {
            **{name: getattr(config.simulated, name) for name in fields},
            **config.simulated.machine.provenance(),
            "raw_commits": _values(rows, "commit"),
            "table": ", ".join(_values(rows, "table")) or None,
            **provenance(0),
        }
        append_whole(out, [{"row": "verdicts", **one, **about} for one in judgements])
    print(json.dumps(summary))
    return 0


def _values(rows: Mapping[str, Sequence[Mapping[str, Any]]], field: str) -> list[str]:
    return sorted({row[field] for of in rows.values() for row in of if row.get(field)})


def judged(config: Comparison, trace: Trace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare ``ppd`` with the other ways on one trace.

    A verdict goes by its interval alone, until ``family.correct`` replaces it by what ``p`` shows.

    Raises:
        ConfigError: a way was not measured with all seeds.
    """
    every = {
        way.name: _turns(rows, trace.name, way, seeds_of(config, trace, way))
        for way in ways(config)
    }
    runs = _runs(rows, config, trace)
    plain = {name: turns for name, turns in every.items() if not _foresees(name)}
    shared = _shared(plain.values())
    if not shared:
        raise ConfigError("no conversation had a later turn on every way")
    return {
        "trace": trace.name,
        "asked": msgspec.to_builtins(trace),
        "conversations": len({place for turns in every.values() for place in turns.by_place}),
        "windows": len(config.seeds_of(trace)),
        "planned_conversations": sum(run.get("conversations", 0) for run in runs[BASE]) or None,
        "later_turns": sum(len(turns) for turns in every[BASE].by_place.values()),
        "compared_turns": sum(len(every[BASE].by_place[place]) for place in shared),
        "ways": _figures(every, runs),
        "verdicts": list(_verdicts(config, every, Sample(plain, shared), shared)),
    }


def change(
    config: Comparison, trace: Trace, rows: Sequence[Mapping[str, Any]], mine: str, base: str
) -> dict[str, tuple[float, float, float]]:
    """Divide one way's later turns by another's, at the median and the 90th percentile.

    Returns:
        By metric (``ttft_p50``, ``tpot_p90``, ...) the ratio and both ends of its 95 % interval.

    Raises:
        ConfigError: a way was not measured with all seeds.
    """
    seeds = config.seeds_of(trace)
    both = {
        way.name: _turns(rows, trace.name, way, seeds)
        for way in ways(config)
        if way.name in (mine, base, BASE)
    }
    shared = _shared(both.values())
    sample = Sample(both, shared)

    def ratio(counts: Counts) -> Array:
        return sample.quantiles(mine, counts) / sample.quantiles(base, counts)

    point, drawn = ratio(once(shared)), [ratio(counts) for counts in _draws(shared)]
    low, high = np.percentile(np.array(drawn), _INTERVAL, axis=0)
    return {
        f"{metric}_{quantile}": (float(point[q, m]), float(low[q, m]), float(high[q, m]))
        for q, quantile in enumerate(QUANTILES)
        for m, metric in enumerate(("ttft", "tpot"))
    }


def measured(runs: Sequence[Mapping[str, Any]]) -> Comparison:
    """Reconstruct a comparison from the runs of a raw file: the seeds that every way has.

    Args:
        runs: rows of kind ``run``.

    Raises:
        ConfigError: nothing was compared yet.
    """
    names = list(dict.fromkeys(run["way"] for run in runs))
    mine = f"{PPD} "
    seeds: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        seeds[run["trace"]][run["seed"]].add(run["way"])
    traces = [
        Trace(
            name, "", 1, seeds=tuple(sorted(s for s, has in of.items() if len(has) == len(names)))
        )
        for name, of in seeds.items()
    ]
    if BASE not in names or not any(trace.seeds for trace in traces):
        raise ConfigError("no window was measured with every policy yet")
    asked = [
        parse(name.removeprefix(mine))
        for name in sorted(names)
        if name.startswith(mine) and name != AGAIN
    ]
    return Comparison(
        seeds=(),
        traces=tuple(trace for trace in traces if trace.seeds),
        weightings=tuple(one for one in asked if isinstance(one, Weights)),
        targets=tuple(one for one in asked if isinstance(one, Targets)),
        policies=tuple(name for name in names if not name.startswith(mine)),
    )


def _turns(rows: Sequence[Mapping[str, Any]], trace: str, way: Way, seeds: Sequence[int]) -> Turns:
    by_place: dict[Place, list[tuple[float, float]]] = defaultdict(list)
    failed, seen = 0, set()
    for row in rows:
        if (row["trace"], row["way"]) != (trace, way.name) or row["seed"] not in seeds:
            continue
        if row["row"] == "run":
            seen.add(row["seed"])
        elif row["error"]:
            failed += 1
        elif row["turn"] > 1:
            by_place[row["seed"], row["conversation"]].append((row["ttft_ms"], row["tpot_ms"]))
    if missing := set(seeds) - seen:
        raise ConfigError(f"trace {trace}, {way.name}: seeds {sorted(missing)} are not measured")
    return Turns({place: np.array(turns) for place, turns in by_place.items()}, failed)


def _runs(
    rows: Sequence[Mapping[str, Any]], config: Comparison, trace: Trace
) -> dict[str, list[Mapping[str, Any]]]:
    seeds = {way.name: seeds_of(config, trace, way) for way in ways(config)}
    runs: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        is_of_trace = row["row"] == "run" and row["trace"] == trace.name
        if is_of_trace and row["seed"] in seeds.get(row["way"], ()):
            runs[row["way"]].append(row)
    return runs


# -- costs ------------------------------------------------------------------------------------


def _verdicts(
    config: Comparison, every: Mapping[str, Turns], sample: Sample, shared: Sequence[Place]
) -> Iterator[dict[str, Any]]:
    asked = list(questions_of(config))
    points = sample.costs(asked, once(shared))
    drawn = [sample.costs(asked, counts) for counts in _draws(shared)]
    spread = {name: np.array([one[name] for one in drawn]) for name in points}
    windows = len({seed for seed, _ in shared})
    for i, question in enumerate(asked):
        named = label(question.objective)
        mine = f"{PPD} {named}"
        costs = {name: float(points[name][i]) for name in (*config.policies, mine)}
        best = min(config.rivals, key=costs.__getitem__)
        difference = spread[mine][:, i] - spread[best][:, i]
        low, high = np.percentile(difference, _INTERVAL)
        found = {
            "weights": named,
            "at": question.at,
            "costs": {name: round(value, 3) for name, value in costs.items()},
            "best_static": best,
            "difference": round(costs[mine] - costs[best], 3),
            "interval": [round(float(low), 3), round(float(high), 3)],
            "verdict": "beats" if high < 0 else "loses" if low > 0 else "ties",
            "better": costs[mine] < costs[best],
            "p": (
                family.p_in_window(costs[mine] - costs[best], difference)
                if windows == 1 and config.simulated is None  # simulated windows are cheap
                else family.p_value(costs[mine] - costs[best], difference, windows)
            ),
        }
        if config.simulated is not None:
            if question.at == EACH and f"{CLAIRVOYANT} {named}" in every:
                found["foreseen"] = _foreseen(config, question, every)
            again = float(points[AGAIN][i] - points[BASE][i])
            again_drawn = spread[AGAIN][:, i] - spread[BASE][:, i]
            found["p_again"] = family.p_value(again, again_drawn, windows)
        yield found


def _foresees(way: str) -> bool:
    return way.startswith(f"{CLAIRVOYANT} ")


def _foreseen(config: Comparison, question: Question, every: Mapping[str, Turns]) -> dict[str, Any]:
    """What foresight costs, and others in the windows that it served.

    Its horizon is short, so it may do harm where queues last. In such a window the clairvoyant
    takes the best of all policies. The verdict is of foresight alone.
    """
    named = label(question.objective)
    foresight, mine = f"{CLAIRVOYANT} {named}", f"{PPD} {named}"
    ways_here = {name: every[name] for name in (foresight, mine, BASE, *config.rivals)}
    shared = _shared(ways_here.values())
    if not shared:
        raise ConfigError(f"no conversation had a later turn with {foresight}")
    sample = Sample(ways_here, shared)

    def costs_of(counts: Counts) -> dict[str, float]:
        return {name: float(cost[0]) for name, cost in sample.costs([question], counts).items()}

    costs, drawn = costs_of(once(shared)), [costs_of(counts) for counts in _draws(shared)]
    best = min(config.rivals, key=costs.__getitem__)
    difference = np.array([one[foresight] - one[best] for one in drawn])
    seeds = np.array([seed for seed, _ in shared])
    best_of = {
        int(seed): min(ways_here, key=costs_of((seeds == seed).astype(np.int64)).__getitem__)
        for seed in np.unique(seeds)
    }
    hindsight = Turns({place: every[best_of[place[0]]].by_place[place] for place in shared}, 0)
    (clairvoyant,) = Sample({"": hindsight, BASE: every[BASE]}, shared).costs(
        [question], once(shared)
    )[""]
    return {
        "best_static": best,
        "best": round(costs[best], 4),
        "ppd": round(costs[mine], 4),
        "foresight": round(costs[foresight], 4),
        "clairvoyant": round(float(clairvoyant), 4),
        "windows": len(best_of),
        "foresight_best": sum(name == foresight for name in best_of.values()),
        "better": costs[foresight] < costs[best],
        "p": family.p_value(costs[foresight] - costs[best], difference, len(best_of)),
    }


def _shared(ways: Iterable[Turns]) -> list[Place]:
    """The conversations that every way served to their end, for a failure ends one early."""
    first, *others = (turns.by_place for turns in ways)
    return sorted(
        place
        for place, turns in first.items()
        if all(len(other.get(place, ())) == len(turns) for other in others)
    )


def _draws(shared: Sequence[Place]) -> Iterator[Counts]:
    """Draw seeds, and of each as many conversations as it has."""
    by_seed: dict[int, list[int]] = defaultdict(list)
    for index, (seed, _) in enumerate(shared):
        by_seed[seed].append(index)
    runs, source = [np.array(run) for run in by_seed.values()], np.random.default_rng(0)
    for _ in range(_DRAWS):
        drawn = [runs[i] for i in source.integers(0, len(runs), len(runs))]
        places = [run[source.integers(0, len(run), len(run))] for run in drawn]
        yield np.bincount(np.concatenate(places), minlength=len(shared))


# -- what people read -------------------------------------------------------------------------


def _figures(
    every: Mapping[str, Turns], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    figures = {}
    for name, turns in every.items():
        every_turn = turns.of(sorted(turns.by_place))
        p50, p90 = np.quantile(every_turn, list(QUANTILES.values()), axis=0)
        planned = sum(run["planned"] for run in runs[name])
        later = sum(len(value) for value in turns.by_place.values())
        local = sum(run["routes"].get("local", 0) for run in runs[name])
        figures[name] = {
            "ttft_p50_ms": round(float(p50[0]), 1),
            "ttft_p90_ms": round(float(p90[0]), 1),
            "tpot_p50_ms": round(float(p50[1]), 2),
            "tpot_p90_ms": round(float(p90[1]), 2),
            "local_share": round(local / later, 3),
            "cached_tokens": sum(run["cached_tokens"] for run in runs[name]),
            "kv_mb_moved": round(sum(run["kv_bytes_moved"] for run in runs[name]) / 1e6, 1),
            "failed": sum(run["failed"] for run in runs[name]),
            "planned": planned,
        }
        batches = [run["decode_batch"] for run in runs[name] if "decode_batch" in run]
        if batches:  # of a simulated cluster
            figures[name]["decode_batch"] = round(fmean(batches), 1)
    return figures


def _print(judgement: Mapping[str, Any], name: str) -> None:
    _print_ways(name, judgement["ways"])
    _print_verdicts(judgement["verdicts"])


def _print_ways(trace: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{trace}: later turns")
    print(
        f"{'way':<14} {'TTFT p50':>9} {'p90':>9} {'TPOT p50':>9} {'p90':>7} {'local':>6} "
        f"{'cached':>9} {'KV MB':>8} {'failed':>7}"
    )
    for name, way in figures.items():
        print(
            f"{name:<14} {way['ttft_p50_ms']:>9} {way['ttft_p90_ms']:>9} {way['tpot_p50_ms']:>9} "
            f"{way['tpot_p90_ms']:>7} {way['local_share']:>6.0%} {way['cached_tokens']:>9} "
            f"{way['kv_mb_moved']:>8} {way['failed']:>7}"
        )


def _print_verdicts(verdicts: Sequence[Mapping[str, Any]]) -> None:
    for verdict in verdicts:
        low, high = verdict["interval"]
        costs = ", ".join(f"{name} {cost:g}" for name, cost in verdict["costs"].items())
        print(
            f"  {verdict['weights']:>4} {verdict['at']}: ppd {verdict['verdict']} "
            f"{verdict['best_static']} "
            f"({verdict['difference']:+g}, 95 % {low:+g} to {high:+g}); {costs}"
        )
