"""``ppd-eval simulate map``: both routes of later turns by context, new tokens and link.

A sweep is simulated on each machine and link. The remote route has delta transfer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ppd.decision import Route
from ppd.score import Weights, score
from ppd.table import Cell, Table
from ppd.table_file import CellRecord

from ..options import Commands, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from ..summary import percentile
from ..sweep.config import LOCAL, REMOTE, SweepConfig, load_config
from ..sweep.rows import RunResult
from ..table.build import record_of
from ..table.lint import noise_decided
from .machine import Machine
from .sweeping import sweep

_EVEN = Weights()


def add_to(commands: Commands) -> None:
    """Declare ``simulate map``."""
    parser = commands.add_parser(
        "map",
        help="both routes by context, new tokens and link",
        description=(
            "Simulate both routes of later turns over a grid, for each profile and link. The last "
            "line is one JSON object."
        ),
    )
    parser.add_argument("config", type=Path, help="a sweep's configuration, see route-map.toml")
    parser.add_argument("--profiles", nargs="+", required=True, help="of 'profile list'")
    parser.add_argument("--links-gbps", type=float, nargs="+", default=[25.0, 100.0, 400.0])
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate every machine; append a row for each cell, and print how many are of which route.

    Raises:
        ConfigError: the configuration or a profile is wrong, or a file cannot be written.
    """
    config = load_config(options.config)
    config.require_table()
    machines = [Machine(name, gbps) for name in options.profiles for gbps in options.links_gbps]
    for machine in machines:
        machine.load()  # what is wrong is found before anything is simulated
    with multiprocessing.Pool(min(len(machines), len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(partial(rows_of, config), machines, chunksize=1)
    rows = [row for of_machine in found for row in of_machine]
    if options.out is not None:
        append_whole(options.out, rows)
    counts = {choice: sum(row["choice"] == choice for row in rows) for choice in _CHOICES}
    print(json.dumps({"cells": len(rows), **counts}))
    return 0


_CHOICES = (Route.LOCAL.value, Route.REMOTE.value, "tie")


def rows_of(config: SweepConfig, machine: Machine) -> list[dict[str, Any]]:
    """Return a row for each cell that the machine can serve on both routes.

    Raises:
        ConfigError: the machine has no such profile, or can serve too few cells.
    """
    results = list(sweep(config, machine))
    table = Table(record_of(config, results, Path(machine.name)))
    records = sorted(table.record.cells, key=lambda record: record.bins)
    return [
        {
            "row": "cell",
            **machine.provenance(),
            **_point(config, record),
            **_costs(cell),
            **dict(_tails(record, results)),
            "choice": _choice(cell),
            **provenance(config.seeds[0]),
        }
        for record, cell in zip(records, table.cells, strict=True)
        if record.measured
    ]


def _point(config: SweepConfig, record: CellRecord) -> dict[str, float]:
    named = zip(config.axes.each(), record.bins, strict=True)
    return {name: bins[index].at for (name, bins), index in named}


def _costs(cell: Cell) -> dict[str, float]:
    return {
        "remote_ttft_ms": cell.remote.ttft_ms,
        "local_ttft_ms": cell.local.ttft_ms,
        "remote_tpot_ms": cell.remote.tpot_ms,
        "local_tpot_ms": cell.local.tpot_ms,
    }


def _tails(record: CellRecord, results: Sequence[RunResult]) -> Iterator[tuple[str, float]]:
    for name, policy in (("remote", REMOTE), ("local", LOCAL)):
        place = (record.bins[:3], record.bins[3])
        ttft_ms = sorted(
            turn["ttft_ms"]
            for result in results
            if (result.run.place.workload, result.run.place.qps) == place
            and result.run.policy == policy
            for turn in result.later()
        )
        yield f"{name}_ttft_p90_ms", round(percentile(ttft_ms, 0.9), 3)


def _choice(cell: Cell) -> str:
    """The route that even weights choose; a tie where the seeds cannot tell."""
    if noise_decided(cell, _EVEN):
        return "tie"
    prefers_local = score(_EVEN, cell.remote, cell.local).prefers_local
    return (Route.LOCAL if prefers_local else Route.REMOTE).value
