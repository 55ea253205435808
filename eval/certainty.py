"""Whether what was measured tells which route is better, or noise decides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto

import msgspec

from ppd.score import Weights, score
from ppd.table import Costs

from .surface import Cell

RISING = {"ttft_ms": (0, 1, 3), "tpot_ms": (0, 3)}  # axes along which a cost must not fall

_SURE = 2.0  # standard errors
_TIE = 0.25  # of a remote turn's cost: what the wrong route may cost at most in a tie
_FALLS = 0.85  # of the cell before; less than noise explains


class Certainty(Enum):
    """What the score of a cell says."""

    SURE = auto()  # another seed would choose the same route
    TIE = auto()  # another seed might not, and the routes cost about as much
    NOISE = auto()  # another seed might not, and the wrong route may cost much more


def certainty(points: float, error: float, weights: Weights, *, agrees: bool = True) -> Certainty:
    """Judge a score.

    Args:
        points: the score; above 0 local is better.
        error: its standard error.
        agrees: whether the route that the table chooses is the better one by this score.
    """
    if agrees and abs(points) >= _SURE * error:
        return Certainty.SURE
    costs = sum(msgspec.structs.astuple(weights))  # of a remote turn
    return Certainty.TIE if abs(points) + _SURE * error <= _TIE * costs else Certainty.NOISE


def mean_score(points: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the seeds' scores, and its standard error.

    With a seed both routes serve the same arrivals, so scores differ less than costs do.

    Args:
        points: one score a seed, of two seeds at least.
    """
    return statistics.mean(points), statistics.stdev(points) / math.sqrt(len(points))


def noisy(by_seed: Mapping[Cell, Sequence[tuple[Costs, Costs]]]) -> set[Cell]:
    """Return the cells that need another seed at even weights.

    Noise decides their route, or makes a cost fall where it should rise.

    Args:
        by_seed: costs of the remote and of the local route with each seed.
    """
    weights = Weights()
    known = {cell: routes for cell, routes in by_seed.items() if len(routes) > 1}
    found = set()
    for cell, routes in known.items():
        points = [score(weights, remote, local).local for remote, local in routes]
        if certainty(*mean_score(points), weights) is Certainty.NOISE:
            found.add(cell)
    for route in (0, 1):
        for quantity, axes in RISING.items():
            values = {
                cell: [getattr(routes[route], quantity) for routes in of_seeds]
                for cell, of_seeds in known.items()
            }
            for axis in axes:
                for low, high in neighbours(known, axis):
                    if seeds_fell(values[low], values[high]):
                        found |= {low, high}
    return found


def neighbours(cells: Iterable[Cell], axis: int) -> Iterator[tuple[Cell, Cell]]:
    """Yield the pairs of cells that are next to each other along an axis, the lower bin first."""
    found = set(cells)
    for cell in sorted(found):
        above = (*cell[:axis], cell[axis] + 1, *cell[axis + 1 :])
        if above in found:
            yield cell, above


def seeds_fell(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a cost falls to the next cell, by the values of each cell's seeds."""
    noise = math.hypot(*(max(values) - min(values) for values in (before, after)))
    return fell(statistics.median(before), statistics.median(after), noise)


def fell(before: float, after: float, noise: float) -> bool:
    """Whether a cost that should rise to the next cell falls, by more than noise explains."""
    return after < _FALLS * before and before - after > noise
