"""``ppd-eval table build``: from a sweep's raw rows to a decision table.

Cells that an adaptive sweep left out get the values of a surface through the measured ones
(``eval.surface``), and no seeds.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ppd.arrivals import ArrivalRate
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.machine import Machine
from ppd.score import Weights
from ppd.table import Table
from ppd.table_file import (
    VERSION,
    CellRecord,
    Measured,
    Provenance,
    Statistic,
    TableRecord,
)

from ..surface import Cell, Surface, cells_of, places
from ..sweep.config import LOCAL, REMOTE, Place, SweepConfig
from ..sweep.rows import RunResult, read_runs
from .lint import decisions

_POLICIES = {Route.REMOTE: REMOTE, Route.LOCAL: LOCAL}
_MAX_LOST = 0.05  # share of turns that failed or strayed, beyond which a median flatters
_MIN_MEASURED = 8  # cells, before others are filled from them

Runs = dict[tuple[Place, str], list[RunResult]]


def build(config: SweepConfig, raw: Path, out: Path) -> dict[str, Any]:
    """Write the table of a sweep, and return a summary of it.

    Raises:
        ConfigError: runs are missing, too much failed, they are of several models, or the file
            cannot be written.
        TableError: what was measured is no table.
    """
    return write_table(config, list(read_runs(config, raw)), raw, out)


def write_table(
    config: SweepConfig, results: Sequence[RunResult], raw: Path, out: Path
) -> dict[str, Any]:
    """Write the table of some results, and return a summary of it.

    Args:
        raw: what the results were read from, for messages.

    Raises:
        ConfigError, TableError: of :func:`build`.
    """
    config.require_table()
    record = record_of(config, results, raw)
    table = Table(record)  # refuses what no router would take
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    for cell, kept in zip(record.cells, table.cells, strict=True):
        held = config.axes.qps[cell.bins[3]]
        for route, measured in (("remote", cell.remote), ("local", cell.local)):
            if cell.measured and not held.low <= measured.qps < held.high:
                print(f"{kept.label} {route}: {measured.qps:.2f} qps arrived, outside its bin")
    about = {"cells": len(record.cells), "table": str(out), "digest": record.digest}
    return {**about, **decisions(table, Weights())}


def record_of(config: SweepConfig, results: Sequence[RunResult], raw: Path) -> TableRecord:
    """Build the record of a table from the results of a sweep.

    Raises:
        ConfigError: of :func:`build`.
    """
    seeds = {*config.seeds, *config.more_seeds}
    results = [result for result in results if result.run.seed in seeds]
    summaries = [result.summary for result in results]
    if len({summary["model"] for summary in summaries}) != 1:
        raise ConfigError(f"{raw}: must hold runs of {config.digest}, this sweep, with one model")
    runs: Runs = defaultdict(list)
    for result in results:
        runs[result.run.place, result.run.policy].append(result)
    return TableRecord(
        version=VERSION,
        model=summaries[0]["model"],
        shape=config.shape,
        provenance=Provenance(
            hardware=_all(summaries, "hardware"),
            engine=_all(summaries, "engine"),
            plugin=_all(summaries, "plugin"),
            commit=_all(summaries, "commit"),
            at=max(summary["at"] for summary in summaries),
            sweep=msgspec.to_builtins(config),
        ),
        prefill_ms_per_token=round(_slope(_first_turns(results)), 6),
        append_ms_per_token=round(_slope(_appends(results)), 6),
        axes=config.axes,
        cells=tuple(_cells(config, runs)),
        machine=_machine(summaries, raw),
    )


def _machine(runs: Sequence[dict[str, Any]], raw: Path) -> Machine | None:
    """The machine of the runs; None if their rows have none."""
    found = [run.get("machine") for run in runs]
    if any(one != found[0] for one in found):
        raise ConfigError(f"{raw}: must hold runs of one machine")
    return None if found[0] is None else msgspec.convert(found[0], Machine)


def _all(runs: Iterable[dict[str, Any]], name: str) -> str:
    return " and ".join(sorted({run[name] for run in runs}))


# -- cells ----------------------------------------------------------------------------------


def _cells(config: SweepConfig, runs: Runs) -> list[CellRecord]:
    quiet = _quiet(config, runs)
    measured: dict[Cell, CellRecord] = {}
    for cell in cells_of(config.axes):
        place = Place(cell[:3], cell[3])
        seeds = [
            {result.run.seed for result in runs[place, policy]} for policy in _POLICIES.values()
        ]
        more = seeds[0] & seeds[1] & set(config.more_seeds)
        wanted = set(config.seeds) | more if config.adaptive is None else seeds[0] | seeds[1]
        for route, have in zip(_POLICIES, seeds, strict=True):
            if missing := wanted - have:
                where = f"workload {list(cell[:3])} qps {cell[3]} {route}"
                raise ConfigError(f"{where}: seeds {sorted(missing)} are missing")
        if wanted:
            measured[cell] = CellRecord(
                bins=cell,
                remote=_measured(config, runs, place, Route.REMOTE, quiet, wanted),
                local=_measured(config, runs, place, Route.LOCAL, quiet, wanted),
                seeds=tuple(sorted(wanted)),
            )
    return list(_filled(config, measured))


def _quiet(config: SweepConfig, runs: Runs) -> dict[tuple[Place, Route], float]:
    """Median TTFT of each workload that was measured when nothing else was served."""
    quiet = {}
    for workload in config.workloads():
        place = Place(workload, None)
        for route, policy in _POLICIES.items():
            of_place = runs[place, policy]
            missing = set(config.seeds) - {result.run.seed for result in of_place}
            if config.adaptive is None and missing:
                where = f"workload {list(workload)} quiet {route}"
                raise ConfigError(f"{where}: seeds {sorted(missing)} are missing")
            if of_place:
                where = f"workload {list(workload)} quiet {route}"
                _check_lost(of_place, where)
                quiet[place, route] = _statistic(of_place, "ttft_ms", where).median
    return quiet


def _measured(
    config: SweepConfig,
    runs: Runs,
    place: Place,
    route: Route,
    quiet: dict[tuple[Place, Route], float],
    seeds: set[int],
) -> Measured:
    of_place = [result for result in runs[place, _POLICIES[route]] if result.run.seed in seeds]
    of_cell = sorted(of_place, key=lambda result: result.run.seed)
    where = f"workload {list(place.workload)} qps {place.qps} {route}"
    _check_lost(of_cell, where)
    alone = quiet.get((Place(place.workload, None), route))
    if alone is None:
        raise ConfigError(f"{where}: its quiet run is missing")
    return Measured(
        ttft_ms=_statistic(of_cell, "ttft_ms", where),
        tpot_ms=_statistic(of_cell, "tpot_ms", where),
        quiet_ttft_ms=alone,
        running=round(statistics.mean(map(_running, of_cell)) / config.homes, 3),
        qps=round(statistics.mean(_arrived(result.turns) for result in of_cell) / config.homes, 3),
        tokens_per_s=tuple(round(_throughput(result), 3) for result in of_cell),
    )


def lost(*runs: RunResult) -> int:
    """Count the turns that failed or took another route; 0 if they are few."""
    turns = sum(result.summary["failed"] + result.summary["strayed"] for result in runs)
    return turns if turns > _MAX_LOST * sum(result.summary["turns"] for result in runs) else 0


def _check_lost(runs: Sequence[RunResult], where: str) -> None:
    if turns := lost(*runs):
        raise ConfigError(f"{where}: {turns} turns failed, or took another route")


def _statistic(runs: Sequence[RunResult], name: str, where: str) -> Statistic:
    by_seed = [[turn[name] for turn in result.later()] for result in runs]
    values = sorted(value for of_seed in by_seed for value in of_seed)
    if not values:  # in a hybrid, replicas may have got all of a few conversations
        raise ConfigError(f"{where}: no later turn was measured, more conversations are needed")
    medians = [round(statistics.median(of_seed), 3) for of_seed in by_seed if of_seed]
    return Statistic(
        median=round(statistics.median(values), 3),
        p99=round(values[min(len(values) - 1, int(0.99 * len(values)))], 3),
        n=len(values),
        spread=round(max(medians) - min(medians), 3),
        medians=tuple(medians) if len(medians) == len(runs) else (),
    )


def _running(result: RunResult) -> float:
    """Mean number of requests that decoded (Little's law)."""
    decoding_ms = sum(turn["tpot_ms"] * (turn["output_tokens"] - 1) for turn in result.turns)
    return float(decoding_ms / (1e3 * result.summary["wall_s"]))


def _throughput(result: RunResult) -> float:
    """Output tokens a second of the cluster, from the first request to the last reply's end."""
    turns = [turn for turn in result.turns if not turn["error"]]
    begun_s = min(turn["sent_at_s"] for turn in turns)
    ended_s = max(turn["sent_at_s"] + turn["e2e_ms"] / 1e3 for turn in turns)
    return float(sum(turn["output_tokens"] for turn in turns) / (ended_s - begun_s))


def _arrived(turns: Sequence[dict[str, Any]]) -> float:
    """Turns a second while turns arrived, as a router's window would have it in the long run."""
    rate = ArrivalRate(window_s=1e9)
    sent_at_s = sorted(turn["sent_at_s"] for turn in turns)
    for at_s in sent_at_s:
        rate.note(at_s)
    return rate.per_second(sent_at_s[-1])


# -- what was not measured ------------------------------------------------------------------


def _filled(config: SweepConfig, measured: dict[Cell, CellRecord]) -> Iterator[CellRecord]:
    cells = cells_of(config.axes)
    if len(measured) == len(cells):
        yield from (measured[cell] for cell in cells)
        return
    if len(measured) < _MIN_MEASURED:
        raise ConfigError(
            f"{len(measured)} of {len(cells)} cells were measured: at least {_MIN_MEASURED} "
            "must be, before others can be filled from them"
        )
    made = {route: _around(config, measured, route) for route in ("remote", "local")}
    for number, cell in enumerate(cells):
        yield measured.get(cell) or CellRecord(
            bins=cell, remote=made["remote"][number], local=made["local"][number], seeds=()
        )


def _around(config: SweepConfig, measured: dict[Cell, CellRecord], route: str) -> list[Measured]:
    """Every cell by the surfaces through those that were measured."""
    everywhere = places(config.axes)
    cells = cells_of(config.axes)
    at = everywhere[[cells.index(cell) for cell in measured]]

    def surface(value: Callable[[Measured], float]) -> list[float]:
        logs = [math.log(value(getattr(record, route))) for record in measured.values()]
        return [math.exp(value) for value in Surface.through(at, logs).at(everywhere)[0]]

    ttft, tpot = surface(lambda m: m.ttft_ms.median), surface(lambda m: m.tpot_ms.median)
    ttft_tail = surface(lambda m: m.ttft_ms.p99 / m.ttft_ms.median)
    tpot_tail = surface(lambda m: m.tpot_ms.p99 / m.tpot_ms.median)
    quiet = surface(lambda m: m.quiet_ttft_ms)
    running, qps = surface(lambda m: m.running + 1e-3), surface(lambda m: m.qps + 1e-3)
    tokens_per_s = surface(lambda m: statistics.geometric_mean(m.tokens_per_s))
    return [
        Measured(
            ttft_ms=_smooth(ttft[i], ttft_tail[i]),
            tpot_ms=_smooth(tpot[i], tpot_tail[i]),
            quiet_ttft_ms=round(quiet[i], 3),
            running=round(running[i], 3),
            qps=round(qps[i], 3),
            tokens_per_s=(round(tokens_per_s[i], 3),),
        )
        for i in range(len(cells))
    ]


def _smooth(median: float, tail: float) -> Statistic:
    median = round(median, 3)
    return Statistic(median=median, p99=round(median * max(1.0, tail), 3), n=0, spread=0.0)


# -- what a token costs ---------------------------------------------------------------------


def _first_turns(runs: Iterable[RunResult]) -> Iterator[tuple[int, float]]:
    """Prompt tokens and TTFT of first turns when nothing else was served."""
    for result in runs:
        for turn in result.turns:
            alone = result.run.place.qps is None and turn["route"] == Route.REMOTE
            if alone and turn["turn"] == 1 and not turn["error"]:
                yield turn["new_tokens"], turn["ttft_ms"]


def _appends(runs: Iterable[RunResult]) -> Iterator[tuple[int, float]]:
    """New tokens and TTFT of local turns when nothing else was served."""
    for result in runs:
        if result.run.place.qps is None and result.run.policy == LOCAL:
            for turn in result.later():
                yield turn["new_tokens"], turn["ttft_ms"]


def _slope(points: Iterable[tuple[int, float]]) -> float:
    """Milliseconds for each further token: a line through the medians of each size.

    Raises:
        ConfigError: all are of one size.
    """
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for tokens, ms in points:
        by_tokens[tokens].append(ms)
    if len(by_tokens) < 2:
        raise ConfigError("the cost of a token needs prompts and inputs of at least two sizes")
    medians = [statistics.median(ms) for ms in by_tokens.values()]
    return statistics.linear_regression(list(by_tokens), medians).slope
