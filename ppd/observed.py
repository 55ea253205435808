"""What turns really took against what the table said, cell by cell and route by route.

The table stays; beside it stands a factor for each value, shrunk towards 1 while little has
been seen and never beyond a bound, so that a bad hour cannot turn a cell for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ppd.decision import Route
from ppd.table import Costs

BOUND = 4.0  # no factor is above this, or below its inverse
_PRIOR = 20.0  # so many turns of the table's own weight
_MEMORY = 200.0  # later turns count as if so many had been seen: older ones fade


@dataclass(slots=True)
class _Ratios:
    """Means of log(seen / expected)."""

    turns: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0


class Factor(msgspec.Struct, frozen=True):
    """By how much a cell's route is now taken to differ from the table."""

    cell: int
    route: Route
    turns: int
    ttft: float
    tpot: float


class Observed:
    def __init__(self) -> None:
        self._ratios: dict[tuple[int, Route], _Ratios] = {}

    def note(
        self, cell: int, route: Route, expected: Costs, ttft_ms: float, tpot_ms: float
    ) -> None:
        """One turn took ``ttft_ms`` and ``tpot_ms``, where ``expected`` was."""
        ratios = self._ratios.setdefault((cell, route), _Ratios())
        ratios.turns = min(_MEMORY, ratios.turns + 1.0)
        ratios.ttft += (_log_ratio(ttft_ms, expected.ttft_ms) - ratios.ttft) / ratios.turns
        ratios.tpot += (_log_ratio(tpot_ms, expected.tpot_ms) - ratios.tpot) / ratios.turns

    def correct(self, cell: int, route: Route, costs: Costs) -> Costs:
        """``costs``, shrunk towards what was seen."""
        ratios = self._ratios.get((cell, route))
        if ratios is None:
            return costs
        share = ratios.turns / (ratios.turns + _PRIOR)
        return Costs(
            costs.ttft_ms * math.exp(share * ratios.ttft),
            costs.tpot_ms * math.exp(share * ratios.tpot),
            costs.ttft_tail,
            costs.tpot_tail,
        )

    def factors(self) -> Iterator[Factor]:
        """All that differ from 1, for the operator."""
        for (cell, route), ratios in self._ratios.items():
            share = ratios.turns / (ratios.turns + _PRIOR)
            yield Factor(
                cell,
                route,
                int(ratios.turns),
                math.exp(share * ratios.ttft),
                math.exp(share * ratios.tpot),
            )

    def reset(self) -> None:
        self._ratios.clear()


def _log_ratio(seen: float, expected: float) -> float:
    """Bounded, so that one turn that hung for a minute is one turn."""
    return math.log(max(1 / BOUND, min(BOUND, seen / expected)))
