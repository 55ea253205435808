"""``ppd-eval pool queueing``: simulated bursts at some loads, in every way, with less of Python."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ppd.ann.engine import StepShape
from ppd.ann.schedule import Stage

from ..provenance import provenance
from ..raw_rows import Write, appending
from .arrivals import draw
from .orders import Way
from .queueing import CORES, Costs, Ours, mean_alone, serve

_PYTHON = (1.0, 0.5, 0.0)  # shares of its time
_WIDE_LOAD, _WIDER = 0.3, (2, 4)  # the widest decode search keeps 512 and 1,024 nodes
_NEVER = 1 << 30
_WAYS = {way.value: (way, Ours()) for way in Way} | {
    "ours_whole": (Way.OURS, Ours(shape=replace(StepShape(), each=_NEVER))),
}


def run(loads: Sequence[float], seeds: int, out: Path | None, seconds: float = 20.0) -> int:
    """Simulate all ways at all loads; the last line on stdout is one JSON object of medians."""
    summary: dict[str, dict[str, float]] = {}
    with appending(out) as write:
        for load in loads:
            summary[f"load{load}"] = _simulate(load, 1, _PYTHON, seeds, seconds, write)
        for wider in _WIDER:
            name = f"load{_WIDE_LOAD}_wider{wider}"
            summary[name] = _simulate(_WIDE_LOAD, wider, (1.0,), seeds, seconds, write)
    print(json.dumps(summary))
    return 0


def _simulate(
    load: float, wider: int, shares: Sequence[float], seeds: int, seconds: float, write: Write
) -> dict[str, float]:
    """Simulate all ways at one load, and return the medians with all of Python's time."""
    costs = Costs()
    capacity = CORES / mean_alone(draw(2000.0, seconds, 1, seeds, wider), costs)
    values: dict[str, list[float]] = {}
    for seed in range(seeds):
        origin = {"load": load, "wider": wider, "capacity": capacity, **provenance(seed)}
        arrivals = draw(capacity * load, seconds, 1, seed, wider)
        for name, (way, variant) in _WAYS.items():
            for python in shares:
                given = costs.with_python(python)
                served = serve(way, arrivals, given, variant)
                row: dict[str, Any] = {"scheduling_us": served.scheduling_us()}
                for stage in Stage:
                    row[f"{stage}_p99_us"] = served.waits.p99_us(stage)
                    row[f"{stage}_missed"] = served.waits.missed(stage)
                write({"way": name, "python_share": python, **row, **asdict(given), **origin})
                if python == 1.0:
                    for key, value in row.items():
                        values.setdefault(f"{name}_{key}", []).append(value)
    return {key: round(statistics.median(of), 4) for key, of in values.items()}
