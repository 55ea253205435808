"""``ppd-eval pool queueing``: simulated bursts at some loads, in every way, with less of Python."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppd.ann.schedule import MAX_RESERVED, Controls, Stage

from ..provenance import provenance
from ..raw_rows import appending
from .arrivals import draw
from .orders import Way
from .queueing import CORES, Costs, Ours, mean_alone, serve

_PYTHON = (1.0, 0.5, 0.0)  # shares of its time
_STRICT = Controls(MAX_RESERVED, flush_s=0.0)  # all prefill takes precedence, decode has its floor
_WAYS = {way.value: (way, Ours()) for way in Way} | {
    "ours_whole": (Way.OURS, Ours(whole=True)),
    "ours_whole_strict": (Way.OURS, Ours(_STRICT, whole=True)),
}


def run(loads: Sequence[float], seeds: int, out: Path | None, seconds: float = 20.0) -> int:
    """Simulate all ways at all loads; the last line on stdout is one JSON object of medians."""
    costs = Costs()
    capacity = CORES / mean_alone(draw(2000.0, seconds, 1, seeds), costs)
    summary: dict[str, dict[str, float]] = {}
    with appending(out) as write:
        for load in loads:
            values: dict[str, list[float]] = {}
            for seed in range(seeds):
                origin = {"load": load, "capacity": capacity, **provenance(seed)}
                arrivals = draw(capacity * load, seconds, 1, seed)
                for name, (way, variant) in _WAYS.items():
                    for python in _PYTHON:
                        given = costs.with_python(python)
                        served = serve(way, arrivals, given, variant)
                        row: dict[str, Any] = {"scheduling_us": served.scheduling_us()}
                        for stage in Stage:
                            row[f"{stage}_p99_us"] = served.waits.p99_us(stage)
                            row[f"{stage}_missed"] = served.waits.missed(stage)
                        write(
                            {"way": name, "python_share": python, **row, **asdict(given), **origin}
                        )
                        if python == 1.0:
                            for key, value in row.items():
                                values.setdefault(f"{name}_{key}", []).append(value)
            summary[f"load{load}"] = {
                key: round(statistics.median(of), 4) for key, of in values.items()
            }
    print(json.dumps(summary))
    return 0
