"""The decision table: what both routes of a later turn cost, looked up by workload.

Owns the lookup. How costs become a choice is ``ppd.score``'s; what a file holds,
``ppd.table_file``'s; how a table comes about, ``eval``'s.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ppd.errors import TableError
from ppd.table_file import Axes, CellRecord, Measured, Statistic, TableRecord, decode, problems

_MAX_PROBLEMS = 20  # in one message
# From the range of n values to their standard deviation: mean of the range of n normal ones.
_RANGE = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970}
_UNKNOWN_NOISE = 0.05  # relative; one seed tells none


@dataclass(frozen=True, slots=True)
class Costs:
    """What a route costs, in milliseconds: the medians, and how far the tails reach.

    ``*_tail`` is the 99th percentile divided by the median.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_tail: float
    tpot_tail: float


@dataclass(frozen=True, slots=True)
class Noise:
    """How well a cell is known: relative standard errors of its quotients, local over remote."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell, ready for decisions.

    Attributes:
        running: that of its remote run.
        quiet_remote_ms, quiet_local_ms: TTFT when nothing waits.
    """

    index: int
    label: str
    remote: Costs
    local: Costs
    noise: Noise
    running: float
    quiet_remote_ms: float
    quiet_local_ms: float


class Table:
    """A valid table.

    Raises:
        TableError: naming everything that is wrong with ``record``.
    """

    def __init__(self, record: TableRecord) -> None:
        if wrong := list(problems(record)):
            more = len(wrong) - _MAX_PROBLEMS
            shown = wrong[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
            raise TableError("; ".join(shown))
        self.record = record
        axes = [bins for _, bins in record.axes.each()]
        self._lows = tuple(tuple(b.low for b in bins) for bins in axes)
        self._highs = tuple(bins[-1].high for bins in axes)
        self._points = tuple(tuple(math.log1p(b.at) for b in bins) for bins in axes)
        sizes = [len(bins) for bins in axes]
        self._strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        by_bins: dict[tuple[int, ...], CellRecord] = {c.bins: c for c in record.cells}
        self.cells = tuple(
            _cell(i, record.axes, by_bins[bins])
            for i, bins in enumerate(product(*map(range, sizes)))
        )

    @classmethod
    def parse(cls, data: bytes) -> Table:
        """Raises:
        TableError: ``data`` is no table, or of a format this version does not read.
        """
        return cls(decode(data))

    def require(self, models: Sequence[str]) -> None:
        """Raises:
        TableError: it was measured with another model than ``models``, the one served.
        """
        if not self.is_for(models):
            raise TableError(
                f"it was measured with {self.record.model}, the workers serve {', '.join(models)}"
            )

    def is_for(self, models: Sequence[str]) -> bool:
        """Whether it was measured with the model that is served (under several names)."""
        return base_name(self.record.model) in map(base_name, models)

    def find(self, context: float, new: float, output: float, qps: float) -> Cell | None:
        """The cell of a workload; None if a value lies beyond its axis."""
        at = (context, new, output, qps)
        index = 0
        for value, lows, high, stride in zip(
            at, self._lows, self._highs, self._strides, strict=True
        ):
            if not value < high:
                return None
            below = bisect_right(lows, value)
            if not below:
                return None
            index += (below - 1) * stride
        return self.cells[index]

    def interpolate(
        self, context: float, new: float, output: float, qps: float
    ) -> tuple[Costs, Costs]:
        """Costs (remote, local) between the points where the nearest cells were measured.

        Linear in the logarithms, of axes and costs alike, which never gives a negative cost;
        beyond the outermost points the nearest cell's.
        """
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for value, points, stride in zip(
            (context, new, output, qps), self._points, self._strides, strict=True
        ):
            low, share = _between(points, math.log1p(value))
            corners = [
                (index + (low + step) * stride, weight * part)
                for index, weight in corners
                for step, part in ((0, 1.0 - share), (1, share))
                if part > 0.0
            ]
        if len(corners) == 1:
            cell = self.cells[corners[0][0]]
            return cell.remote, cell.local
        blend = [(weight, self.cells[index]) for index, weight in corners]
        return (
            _blend([(weight, cell.remote) for weight, cell in blend]),
            _blend([(weight, cell.local) for weight, cell in blend]),
        )


def base_name(model: str) -> str:
    """A model's name without the folders before it: workers may keep it in different ones."""
    return model.rstrip("/").rpartition("/")[2]


def _between(points: Sequence[float], value: float) -> tuple[int, float]:
    """The point below ``value``, and which share of the way to the next it has gone."""
    above = bisect_right(points, value)
    if above == 0:
        return 0, 0.0
    if above == len(points):
        return above - 1, 0.0
    low, high = points[above - 1], points[above]
    return above - 1, (value - low) / (high - low)


def _blend(parts: Sequence[tuple[float, Costs]]) -> Costs:
    log, exp = math.log, math.exp
    ttft = tpot = ttft_tail = tpot_tail = 0.0
    for weight, costs in parts:
        ttft += weight * log(costs.ttft_ms)
        tpot += weight * log(costs.tpot_ms)
        ttft_tail += weight * costs.ttft_tail
        tpot_tail += weight * costs.tpot_tail
    return Costs(exp(ttft), exp(tpot), ttft_tail, tpot_tail)


def _cell(index: int, axes: Axes, record: CellRecord) -> Cell:
    named = zip(axes.each(), record.bins, strict=True)
    label = " ".join(
        f"{name.removesuffix('_tokens')}=[{bins[i].low:g},{bins[i].high:g})"
        for (name, bins), i in named
    )
    return Cell(
        index=index,
        label=label,
        remote=_costs(record.remote),
        local=_costs(record.local),
        noise=_noise(record),
        running=record.remote.running,
        quiet_remote_ms=record.remote.quiet_ttft_ms,
        quiet_local_ms=record.local.quiet_ttft_ms,
    )


def _costs(measured: Measured) -> Costs:
    ttft, tpot = measured.ttft_ms, measured.tpot_ms
    return Costs(ttft.median, tpot.median, ttft.p99 / ttft.median, tpot.p99 / tpot.median)


def _noise(record: CellRecord) -> Noise:
    """By how far the seeds' medians lie apart."""
    remote, local, seeds = record.remote, record.local, len(record.seeds)
    return Noise(
        ttft=math.hypot(_error(remote.ttft_ms, seeds), _error(local.ttft_ms, seeds)),
        tpot=math.hypot(_error(remote.tpot_ms, seeds), _error(local.tpot_ms, seeds)),
    )


def _error(statistic: Statistic, seeds: int) -> float:
    """Standard error of a median, as a share of it."""
    if seeds < 2:
        return _UNKNOWN_NOISE
    deviation = statistic.spread / _RANGE.get(seeds, 3.1)
    return deviation / math.sqrt(seeds) / statistic.median
