"""Correction factors for a decision table, from the measured TTFT and TPOT of served turns.

The table itself is not changed. Each cell and route has one factor for TTFT and one for TPOT.
A factor is shrunk towards 1 while there are few turns, and it is bounded. So an hour of unusual
load cannot change the choice of a cell for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ppd.decision import Route
from ppd.table import Costs

BOUND = 4.0  # the largest factor; its inverse is the smallest
_PRIOR = 20.0  # the weight of the table's own value, in turns
_MEMORY = 200.0  # turns of the running mean: older ones fade


@dataclass(slots=True)
class _Ratios:
    """Running means of log(measured / expected)."""

    turns: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0


class Factor(msgspec.Struct, frozen=True):
    """The current correction factors of a cell and route.

    Attributes:
        cell: the index of the cell.
        turns: weight of the observations, in turns.
        ttft: factor on the table's TTFT.
        tpot: factor on the table's TPOT.
    """

    cell: int
    route: Route
    turns: int
    ttft: float
    tpot: float


class Observed:
    """The observations of all cells and routes."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, Route], _Ratios] = {}

    def note(
        self, cell: int, route: Route, expected: Costs, ttft_ms: float, tpot_ms: float
    ) -> None:
        """Record the measured TTFT and TPOT of a turn whose expected costs were ``expected``."""
        ratios = self._ratios.setdefault((cell, route), _Ratios())
        ratios.turns = min(_MEMORY, ratios.turns + 1.0)
        ratios.ttft += (_log_ratio(ttft_ms, expected.ttft_ms) - ratios.ttft) / ratios.turns
        ratios.tpot += (_log_ratio(tpot_ms, expected.tpot_ms) - ratios.tpot) / ratios.turns

    def correct(self, cell: int, route: Route, costs: Costs) -> Costs:
        """Return ``costs`` multiplied by the factors of the cell and route."""
        ratios = self._ratios.get((cell, route))
        if ratios is None:
            return costs
        share = ratios.turns / (ratios.turns + _PRIOR)
        return Costs(
            costs.ttft_ms * math.exp(share * ratios.ttft),
            costs.tpot_ms * math.exp(share * ratios.tpot),
            costs.ttft_tail,
            costs.tpot_tail,
            costs.tokens_per_s,
        )

    def factors(self) -> Iterator[Factor]:
        """The factors of all cells and routes that have observations."""
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
        """Discard all observations."""
        self._ratios.clear()


def _log_ratio(measured: float, expected: float) -> float:
    """The bounded log ratio: one turn that hung for a minute must not outweigh all others."""
    return math.log(max(1 / BOUND, min(BOUND, measured / expected)))
