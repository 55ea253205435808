"""``ppd-eval table lint``: what is doubtful in a table.

Holes (cells that were not measured, bins that reach far from their point), cells whose route the
noise decided, and costs that fall where they should rise. A table with findings is still a table. A
tie is listed, too, but is no fault: where both routes take about as long, no measurement tells them
apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ppd.score import Weights, score, standard_error
from ppd.table import Cell, Table
from ppd.table_file import CellRecord, Measured, Statistic

from .reading import read

_SURE = 2.0  # standard errors
_TIE = 0.25  # of a remote turn's cost: what the wrong route may cost at most in a tie
_REACH = 8.0  # of a bin, beyond the point where it was measured, as a factor
_FALLS = 0.85  # of the cell before; less than noise explains


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
    print(json.dumps({"table": str(path), **counts, **decisions(table, weights)}))
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
        elif noise_decided(cell, weights):
            result = score(weights, cell.remote, cell.local)
            error = standard_error(weights, cell.remote, cell.local, cell.noise)
            costs = sum(msgspec.structs.astuple(weights))  # of a remote turn
            is_tie = abs(result.local) + _SURE * error <= _TIE * costs
            kind = Kind.TIE if is_tie else Kind.NOISE
            detail = f"score {result.local:+.3f}, its standard error {error:.3f}"
            yield Finding(kind, f"{cell.label}: {detail}")
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
    """Whether the score is nearer to 0 than twice its standard error."""
    points = score(weights, cell.remote, cell.local).local
    return abs(points) < _SURE * standard_error(weights, cell.remote, cell.local, cell.noise)


def _records(table: Table) -> Sequence[CellRecord]:
    """In the order of the table's cells."""
    return sorted(table.record.cells, key=lambda record: record.bins)


def _falls(table: Table, records: Sequence[CellRecord]) -> Iterator[Finding]:
    """More context, input or load must not make a turn cheaper (beyond noise)."""
    by_bins = {record.bins: record for record in records}
    names = [name for name, _ in table.record.axes.each()]
    rising = {"ttft_ms": (0, 1, 3), "tpot_ms": (0, 3)}
    for quantity, axes in rising.items():
        for axis in axes:
            size = len(list(table.record.axes.each())[axis][1])
            for bins, record in by_bins.items():
                if bins[axis] + 1 == size:
                    continue
                above = (*bins[:axis], bins[axis] + 1, *bins[axis + 1 :])
                after = by_bins[above[0], above[1], above[2], above[3]]
                if not (record.measured and after.measured):
                    continue
                for route in ("remote", "local"):
                    pair = (_of(record, route, quantity), _of(after, route, quantity))
                    if fell := _fell(*pair):
                        low, high = (list(cell.bins) for cell in (record, after))
                        what = f"{route} {quantity} {fell} from {low} to {high}"
                        yield Finding(Kind.FALLS, f"{what}, along {names[axis]}")


def _of(record: CellRecord, route: str, quantity: str) -> Statistic:
    measured: Measured = getattr(record, route)
    statistic: Statistic = getattr(measured, quantity)
    return statistic


def _fell(before: Statistic, after: Statistic) -> str | None:
    noise = math.hypot(before.spread, after.spread)
    if after.median < _FALLS * before.median and before.median - after.median > noise:
        return f"falls from {before.median:g} to {after.median:g}"
    return None
