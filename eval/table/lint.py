"""``ppd-eval table lint``: what is doubtful in a table.

Holes (cells that were not measured, bins that reach far from their point), cells whose route the
noise decided, and costs that fall where they should rise, at no lower load. A table with findings
is still a table. A tie is listed, too, but is no fault: where both routes take about as long, no
measurement tells them apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ppd.score import Weights, score, standard_error
from ppd.table import Cell, Table
from ppd.table_file import CellRecord, Measured, Statistic

from ..certainty import RISING, Certainty, certainty, fell, mean_score, neighbours, seeds_fell
from .reading import read

_REACH = 8.0  # of a bin, beyond the point where it was measured, as a factor
_SAME_LOAD = 0.85  # of the turns that arrived in the cell before, at least


class Kind(StrEnum):
    """What is doubtful in a table."""

    UNMEASURED = "unmeasured"  # filled from the cells around
    FAR = "far"  # the bin reaches much further than what was measured
    NOISE = "noise"  # another seed might have chosen the other route, which may cost much more
    FALLS = "falls"  # more work, and yet less time
    TIE = "tie"  # another seed might have chosen the other route, which costs about as much


@dataclass(frozen=True, slots=True)
class Finding:
    """One doubtful place in a table."""

    kind: Kind
    text: str


def run(path: Path, weights: Weights) -> int:
    """Print every finding and one JSON line; 1 if there were any but ties.

    Raises:
        TableError: it is no table, or has no throughput to weigh.
    """
    table = read(path, weights)
    found = list(findings(table, weights))
    for finding in found:
        print(f"{finding.kind.value:<11} {finding.text}")
    counts = {kind.value: sum(finding.kind is kind for finding in found) for kind in Kind}
    about = {"table": str(path), "digest": table.record.digest}
    print(json.dumps({**about, **counts, **decisions(table, weights)}))
    return 1 if any(finding.kind is not Kind.TIE for finding in found) else 0


def findings(table: Table, weights: Weights) -> Iterator[Finding]:
    """Yield all that is doubtful in a table."""
    for name, bins in table.record.axes.each():
        for bin_ in bins:
            if bin_.high > _REACH * max(1.0, bin_.at):
                reach = f"measured at {bin_.at:g}, holds to {bin_.high:g}"
                yield Finding(Kind.FAR, f"{name} [{bin_.low:g}, {bin_.high:g}): {reach}")
    records = _records(table)
    for cell in table.cells:
        record = records[cell.index]
        if not record.measured:
            yield Finding(Kind.UNMEASURED, cell.label)
        elif (judged := judge(cell, weights)) is not Certainty.SURE:
            points, error = _score(cell, weights)
            kind = Kind.TIE if judged is Certainty.TIE else Kind.NOISE
            yield Finding(
                kind, f"{cell.label}: score {points:+.3f}, its standard error {error:.3f}"
            )
    yield from _falls(table, records)


def decisions(table: Table, weights: Weights) -> dict[str, Any]:
    """How many cells go which way, and in how many of them noise decided."""
    records = _records(table)
    local = sum(score(weights, c.remote, c.local).prefers_local for c in table.cells)
    noise = sum(records[c.index].measured and noise_decided(c, weights) for c in table.cells)
    return {
        "local_cells": local,
        "remote_cells": len(table.cells) - local,
        "noise_cells": noise,
        "measured_cells": sum(record.measured for record in records),
    }


def noise_decided(cell: Cell, weights: Weights) -> bool:
    """Whether another seed might have chosen the other route."""
    return judge(cell, weights) is not Certainty.SURE


def judge(cell: Cell, weights: Weights) -> Certainty:
    """Judge whether a cell's seeds tell that its route is the better one."""
    points, error = _score(cell, weights)
    chosen = score(weights, cell.remote, cell.local).prefers_local  # by the medians of all turns
    return certainty(points, error, weights, agrees=chosen is (points > 0))


def _score(cell: Cell, weights: Weights) -> tuple[float, float]:
    """The score and its standard error, by the seeds' scores if the table has them."""
    if len(cell.by_seed) > 1:
        return mean_score([score(weights, *routes).local for routes in cell.by_seed])
    points = score(weights, cell.remote, cell.local).local
    return points, standard_error(weights, cell.remote, cell.local, cell.noise)


def _records(table: Table) -> Sequence[CellRecord]:
    """In the order of the table's cells."""
    return sorted(table.record.cells, key=lambda record: record.bins)


def _falls(table: Table, records: Sequence[CellRecord]) -> Iterator[Finding]:
    """More context, input or load must not make a turn cheaper (beyond noise)."""
    measured = {record.bins: record for record in records if record.measured}
    names = [name for name, _ in table.record.axes.each()]
    for quantity, axes in RISING.items():
        for axis in axes:
            for low, high in neighbours(measured, axis):
                for route in ("remote", "local"):
                    before, after = (_measured(measured[bins], route) for bins in (low, high))
                    if after.qps < _SAME_LOAD * before.qps:
                        continue  # fewer turns arrived, as first turns took longer: not more work
                    costs: tuple[Statistic, ...] = tuple(
                        getattr(of, quantity) for of in (before, after)
                    )
                    if _fell(*costs):
                        what = f"{route} {quantity} falls from {costs[0].median:g} to "
                        where = f"{costs[1].median:g} from {list(low)} to {list(high)}"
                        yield Finding(Kind.FALLS, f"{what}{where}, along {names[axis]}")


def _measured(record: CellRecord, route: str) -> Measured:
    found: Measured = getattr(record, route)
    return found


def _fell(before: Statistic, after: Statistic) -> bool:
    """By the medians of the seeds, as a sweep that asks for more of them; old tables lack these."""
    if before.medians and after.medians:
        return seeds_fell(before.medians, after.medians)
    return fell(before.median, after.median, math.hypot(before.spread, after.spread))
