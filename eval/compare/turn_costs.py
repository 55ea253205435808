"""What a turn costs beside the same turn of the base, for decisions in a simulation.

Without numpy: the processes that fork import this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ppd.score import Weights
from ppd.sessions import session_name

from ..simulation.rows import TurnRow
from .clairvoyant import CostOf
from .rollout import Turn

Times = Mapping[Turn, tuple[float, float]]  # TTFT and TPOT of later turns, in ms


def times_of(rows: Sequence[TurnRow]) -> Times:
    """Return the times of the later turns that did not fail."""
    return {
        (session_name(row.session), row.turn): (row.ttft_ms, row.tpot_ms)
        for row in rows
        if row.turn > 1 and not row.failed
    }


def mean_ratios(times: Times, base: Times) -> tuple[float, float]:
    """Return the geometric means of TTFT and TPOT, each over those of the same turn."""
    logs = [_logs(times[turn], base[turn]) for turn in times if turn in base]
    if not logs:
        return 1.0, 1.0
    return math.exp(fmean(one[0] for one in logs)), math.exp(fmean(one[1] for one in logs))


def _logs(times: tuple[float, float], base: tuple[float, float]) -> tuple[float, float]:
    (ttft_ms, tpot_ms), (base_ttft_ms, base_tpot_ms) = times, base
    has_tpot = tpot_ms > 0 and base_tpot_ms > 0  # a reply of one token has none
    return math.log(ttft_ms / base_ttft_ms), math.log(tpot_ms / base_tpot_ms) if has_tpot else 0.0


def weighted(weights: Weights, means: tuple[float, float]) -> float:
    """Return the cost of geometric means."""
    return weights.ttft * means[0] + weights.tpot * means[1]


def cost_of(weights: Weights, base: Times, means: tuple[float, float]) -> CostOf:
    """Return what a turn adds to the cost of geometric means, if it does not change them much.

    Args:
        base: the times that others are divided by.
        means: about which it is linear.
    """

    def cost(turn: Turn, ttft_ms: float, tpot_ms: float) -> float:
        if turn not in base:
            return 0.0
        ttft, tpot = _logs((ttft_ms, tpot_ms), base[turn])
        return weights.ttft * means[0] * ttft + weights.tpot * means[1] * tpot

    return cost
