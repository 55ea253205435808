"""Decision tables of the report, from the raw rows of their sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ppd.decision import Route
from ppd.score import Weights, score
from ppd.table import Cell
from ppd.table import Table as DecisionTable
from ppd.table_file import CellRecord

from ..summary import percentile
from ..sweep.config import LOCAL, REMOTE, Place, SweepConfig
from ..sweep.rows import RunResult, read_runs
from ..table.build import record_of
from ..table.lint import noise_decided
from .results import Results

AXES = ("context", "new", "reply", "turns/s")  # heads of the columns that :func:`points` gives


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A measured cell of a table: as it was measured, and as decisions use it.

    Attributes:
        ttft_p90_ms: of later turns, remote and local.
    """

    record: CellRecord
    cell: Cell
    ttft_p90_ms: tuple[float, float]

    def choice(self, weights: Weights) -> str:
        """The route that some weights choose, or a tie."""
        if noise_decided(self.cell, weights):
            return "tie"
        prefers = score(weights, self.cell.remote, self.cell.local).prefers_local
        return (Route.LOCAL if prefers else Route.REMOTE).value


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep measured."""

    config: SweepConfig
    table: DecisionTable
    cells: Sequence[MeasuredCell]
    runs: Sequence[RunResult]


def sweep_of(results: Results, name: str) -> Sweep:
    """Return what a file of raw rows holds of its last configuration."""
    return results.once(f"sweep of {name}", lambda: _read(results, name))


def points(sweep: Sweep, cell: MeasuredCell) -> Iterator[str]:
    """Yield where a cell was measured, along each axis."""
    for (_, bins), bin_ in zip(sweep.config.axes.each(), cell.record.bins, strict=True):
        yield f"{bins[bin_].at:,g}"


def _read(results: Results, name: str) -> Sweep:
    begun = results.rows(name).where(row="sweep").rows[-1]
    config = msgspec.convert(begun["asked"], SweepConfig)
    runs = list(read_runs(config, results.folder / name))
    table = DecisionTable(record_of(config, runs, results.folder / name))
    later: dict[tuple[Place, str], list[float]] = {}
    for run in runs:
        of_place = later.setdefault((run.run.place, run.run.policy), [])
        of_place += [turn["ttft_ms"] for turn in run.later()]
    cells = []
    records = sorted(table.record.cells, key=lambda record: record.bins)
    for record, cell in zip(records, table.cells, strict=True):
        if not record.measured:
            continue
        place = Place(record.bins[:3], record.bins[3])
        remote, local = (_p90(later[place, policy]) for policy in (REMOTE, LOCAL))
        cells.append(MeasuredCell(record, cell, (remote, local)))
    return Sweep(config, table, cells, runs)


def _p90(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.9)
