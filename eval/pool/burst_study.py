"""``ppd-eval pool bursts``: rounds of measured bursts at some loads, and their medians."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

from ..provenance import provenance
from ..raw_rows import Write, appending
from . import huge_pages
from .burst_rounds import Rounds
from .given import Given, Sample, print_progress

_LOADS = {"load03": 0.3, "load07": 0.7}


def run(sample: Sample, rounds: int, burst_s: float, threads: int, out: Path | None) -> int:
    """Measure the bursts alone; the last line on stdout is one JSON object."""
    huge_pages.ensure()
    with appending(out) as write:
        rows, queries, _ = sample.embedded()
        of = Rounds(Given(rows, threads).target, queries, threads, burst_s, sample.seed)
        bursty, identical = measure(of, rounds, write, provenance(sample.seed))
    print(json.dumps({"bursty": bursty, "identical_ids": identical}))
    return 0


def measure(
    rounds: Rounds, count: int, write: Write, origin: dict[str, object]
) -> tuple[dict[str, dict[str, float]], bool]:
    """Measure a number of rounds at each load.

    Returns:
        Medians by load, and whether all searches found what they find alone.
    """
    print_progress(f"bursts: one after the other, {rounds.capacity:.0f} searches/s are finished")
    summary: dict[str, dict[str, float]] = {}
    identical = True
    for name, load in _LOADS.items():
        values: dict[str, list[float]] = defaultdict(list)
        for number in range(count):
            for row in rounds.rows(load, number):
                write(origin | row)
                identical &= row.get("identical_ids", True)
                way, stage = row["way"], row["stage"]
                for field in ("p99_us", "missed"):
                    values[f"{way}_{stage}_{field}"].append(row[field])
                values[f"{way}_missed"].append(row["missed_of_all"])
                values[f"{way}_scheduling_us"].append(row["scheduling_us"])
                values[f"{way}_choosing_us"].append(row.get("choosing_us", 0.0))
        summary[name] = {key: round(statistics.median(of), 4) for key, of in values.items()}
        print_progress(json.dumps({name: summary[name]}))
    return summary, identical
