"""``ppd-eval table``: from a sweep's raw rows to a decision table, and a look at one."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ppd.arrivals import ArrivalRate
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.score import Weights, score
from ppd.table import Table
from ppd.table_file import (
    VERSION,
    CellRecord,
    Measured,
    Provenance,
    Statistic,
    TableRecord,
)

from .sweep import Run, SweepConfig, Workload, read_runs

Runs = list[tuple[Run, dict[str, Any], list[dict[str, Any]]]]

_MOST_LOST = 0.05  # share of turns that failed or strayed, beyond which a median flatters


def build(config: SweepConfig, raw: Path, out: Path) -> int:
    """Write the table of a complete sweep.

    Raises:
        ConfigError: runs are missing, too much failed, or they are of several models.
        TableError: what was measured is no table.
    """
    runs = list(read_runs(config, raw))
    summaries = [summary for _, summary, _ in runs]
    if len({summary["model"] for summary in summaries}) != 1:
        raise ConfigError(f"{raw}: must hold runs of {config.digest}, this sweep, with one model")
    record = TableRecord(
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
        prefill_ms_per_token=round(_slope(_first_turns(runs)), 6),
        append_ms_per_token=round(_slope(_appends(runs)), 6),
        axes=config.axes,
        cells=tuple(_cells(config, runs)),
    )
    table = Table(record)  # refuses what no router would take
    out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    for cell, kept in zip(record.cells, table.cells, strict=True):
        held = config.axes.qps[cell.bins[3]]
        for route, measured in (("remote", cell.remote), ("local", cell.local)):
            if not held.low <= measured.qps < held.high:
                print(f"{kept.label} {route}: {measured.qps:.2f} qps arrived, outside its bin")
    print(json.dumps({"table": str(out), "cells": len(record.cells), "runs": len(runs)}))
    return 0


def _all(runs: list[dict[str, Any]], name: str) -> str:
    return " and ".join(sorted({run[name] for run in runs}))


def show(path: Path, weights: Weights) -> int:
    """Each cell in a line: what local saves and loses, and which route even weights choose."""
    table = Table.parse(path.read_bytes())
    record = table.record
    print(f"{record.model}, {record.shape}, {record.provenance.hardware}")
    print(
        f"a token to prefill {record.prefill_ms_per_token:.3f} ms, to append "
        f"{record.append_ms_per_token:.3f} ms"
    )
    print(f"{'TTFT ms':>17}  {'TPOT ms':>15}  saves TTFT  loses TPOT  score  cell")
    for cell in table.cells:
        remote, local = cell.remote, cell.local
        result = score(weights, remote, local)
        print(
            f"{remote.ttft_ms:7.1f} > {local.ttft_ms:7.1f}  {remote.tpot_ms:6.2f} > "
            f"{local.tpot_ms:6.2f}  {result.ttft_saved:9.0%}  {result.tpot_lost:9.0%}  "
            f"{result.local:6.2f}  {cell.label}{'  local' if result.prefers_local else ''}"
        )
    return 0


def _cells(config: SweepConfig, runs: Runs) -> Iterator[CellRecord]:
    by_place: dict[tuple[Workload, int | None, Route], Runs] = defaultdict(list)
    for run in runs:
        if run[0].seed in config.seeds:
            by_place[run[0].workload, run[0].qps, run[0].route].append(run)
    for workload in config.workloads():
        for qps in range(len(config.axes.qps)):
            yield CellRecord(
                bins=(*workload, qps),
                remote=_measured(config, by_place, workload, qps, Route.REMOTE),
                local=_measured(config, by_place, workload, qps, Route.LOCAL),
                seeds=config.seeds,
            )


def _measured(
    config: SweepConfig,
    by_place: dict[tuple[Workload, int | None, Route], Runs],
    workload: Workload,
    qps: int,
    route: Route,
) -> Measured:
    runs, quiet = by_place[workload, qps, route], by_place[workload, None, route]
    for some, which in ((runs, f"qps {qps}"), (quiet, "quiet")):
        where = f"workload {list(workload)} {which} {route}"
        if missing := set(config.seeds) - {run.seed for run, _, _ in some}:
            raise ConfigError(f"{where}: seeds {sorted(missing)} are missing")
        lost = sum(summary["failed"] + summary["strayed"] for _, summary, _ in some)
        if lost > _MOST_LOST * sum(summary["turns"] for _, summary, _ in some):
            raise ConfigError(f"{where}: {lost} turns failed, or took another route")
    return Measured(
        ttft_ms=_statistic(runs, route, "ttft_ms"),
        tpot_ms=_statistic(runs, route, "tpot_ms"),
        quiet_ttft_ms=_statistic(quiet, route, "ttft_ms").median,
        running=round(statistics.mean(map(_running, runs)), 3),
        qps=round(statistics.mean(_arrived(turns) for _, _, turns in runs), 3),
    )


def _later(turns: list[dict[str, Any]], route: Route) -> Iterator[dict[str, Any]]:
    """Later turns on the route they should take: a refused local turn measured neither."""
    for turn in turns:
        if turn["turn"] > 1 and not turn["error"] and turn["route"] == route:
            yield turn


def _statistic(runs: Runs, route: Route, name: str) -> Statistic:
    by_seed = [[turn[name] for turn in _later(turns, route)] for _, _, turns in runs]
    values = sorted(value for of_seed in by_seed for value in of_seed)
    medians = [statistics.median(of_seed) for of_seed in by_seed if of_seed]
    return Statistic(
        median=round(statistics.median(values), 3),
        p99=values[min(len(values) - 1, int(0.99 * len(values)))],
        n=len(values),
        spread=round(max(medians) - min(medians), 3),
    )


def _running(run: tuple[Run, dict[str, Any], list[dict[str, Any]]]) -> float:
    """Mean number of requests that decoded (Little's law)."""
    _, summary, turns = run
    decoding_ms = sum(turn["tpot_ms"] * (turn["output_tokens"] - 1) for turn in turns)
    return float(decoding_ms / (1e3 * summary["wall_s"]))


def _arrived(turns: list[dict[str, Any]]) -> float:
    """Turns a second while turns arrived, as a router's window would have it in the long run."""
    rate = ArrivalRate(window_s=1e9)
    sent_at_s = sorted(turn["sent_at_s"] for turn in turns)
    for at_s in sent_at_s:
        rate.note(at_s)
    return rate.per_second(sent_at_s[-1])


def _first_turns(runs: Runs) -> Iterator[tuple[int, float]]:
    """Prompt tokens and TTFT of first turns when nothing else was served."""
    for run, _, turns in runs:
        for turn in turns:
            if run.qps is None and turn["turn"] == 1 and not turn["error"]:
                yield turn["new_tokens"], turn["ttft_ms"]


def _appends(runs: Runs) -> Iterator[tuple[int, float]]:
    """New tokens and TTFT of local turns when nothing else was served."""
    for run, _, turns in runs:
        if run.qps is None and run.route is Route.LOCAL:
            for turn in _later(turns, Route.LOCAL):
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
