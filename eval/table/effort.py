"""``ppd-eval table effort``: what an adaptive sweep would have saved, by a full one's raw rows.

The choice is made as in a sweep, but each answer is taken from what was measured; then the two
tables' routes are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ppd.errors import ConfigError
from ppd.score import score
from ppd.table import Table

from ..sweep.choice import Adaptive, Medians
from ..sweep.config import Adaptive as Wanted
from ..sweep.config import Run, SweepConfig
from ..sweep.rows import Told, read_runs
from .build import record_of
from .lint import noise_decided


def run(config: SweepConfig, raw: Path) -> int:
    """Print one JSON line.

    Raises:
        ConfigError: ``raw`` does not hold the whole grid.
    """
    told = {one.run: one for one in read_runs(config, raw)}
    whole = msgspec.structs.replace(config, adaptive=None)
    wanted = msgspec.structs.replace(config, adaptive=config.adaptive or Wanted())
    full = Table(record_of(whole, list(told.values()), raw))
    used = _chosen(wanted, told, raw)
    made = Table(record_of(wanted, used, raw))
    assert wanted.adaptive is not None
    agree = {}
    for weights in wanted.adaptive.weightings:
        same = sure = sure_same = 0
        for cell, other in zip(full.cells, made.cells, strict=True):
            alike = (
                score(weights, cell.remote, cell.local).prefers_local
                is score(weights, other.remote, other.local).prefers_local
            )
            same += alike
            if not noise_decided(cell, weights):
                sure += 1
                sure_same += alike
        agree[f"{weights.ttft:g}:{weights.tpot:g}"] = {
            "same_route": same,
            "clear_cells": sure,
            "same_in_clear": sure_same,
        }
    spent = [sum(one.summary["wall_s"] for one in some) for some in (used, told.values())]
    summary = {
        "cells": len(full.cells),
        "measured_cells": sum(record.measured for record in made.record.cells),
        "runs": len(used),
        "runs_full": len(told),
        "share_of_runs": round(len(used) / len(told), 3),
        "share_of_time": round(spent[0] / spent[1], 3),
        "by_weights": agree,
    }
    print(json.dumps(summary))
    return 0


def _chosen(config: SweepConfig, told: dict[Run, Told], raw: Path) -> list[Told]:
    """The runs that an adaptive sweep would have made, in its order."""
    choice = Adaptive(config)
    medians: dict[Run, tuple[float, float] | None] = {}
    seen: Medians = medians
    used: list[Told] = []
    while (job := choice.next(seen, ())) is not None:
        for run in job.runs(config.policies):
            if run not in told:
                where = f"{run.place.workload} qps {run.place.qps} {run.policy} seed {run.seed}"
                raise ConfigError(f"{raw}: not a whole sweep, {where} is missing")
            medians[run] = told[run].medians()
            used.append(told[run])
    return used
