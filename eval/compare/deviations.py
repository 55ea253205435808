"""What one other decision would have saved, and what the router observed at that moment.

Without numpy: the process that forks imports this.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import NamedTuple

from ppd.decision import Assessment, Decision, Features, Route
from ppd.score import Weights

from ..simulation.planned import simulated
from .clairvoyant import Clairvoyant
from .config import BASE, PPD
from .simulated_window import Cluster, Window
from .turn_costs import cost_of, mean_ratios, times_of
from .way import Way

_NOT_NUMBERS = ("session", "home", "has_media", "has_prefill")
_FIELDS = [field.name for field in fields(Features) if field.name not in _NOT_NUMBERS]


class Deviation(NamedTuple):
    """A decision of ``ppd``.

    Attributes:
        observed: numbers of the features, then the table's costs of both routes; NaN where there is
            none.
        is_local: the route that was taken.
        local_costs: what a local turn costs more than a remote one, with the turns after it.
    """

    seed: int
    observed: tuple[float, ...]
    is_local: bool
    local_costs: float


def deviations(cluster: Cluster, weights: Weights, place: Window) -> list[Deviation]:
    """Simulate a window with ``ppd``, and at each of its decisions the other route, too.

    Both routes are simulated as those of a clairvoyant, with ``ppd`` as its base.
    """
    window = simulated(place.planned, end_at_cuts=True)
    base, way = Way(BASE), Way(PPD, weights)
    usual, base_times = (
        times_of(cluster.run(one, cluster.policy(one), window, place.seed).rows)
        for one in (way, base)
    )
    found: list[Deviation] = []

    def note(features: Features, decision: Decision, saved: float) -> bool:
        is_local = decision.route is Route.LOCAL
        costs = saved if is_local else -saved
        found.append(Deviation(place.seed, _observed(features, decision), is_local, costs))
        return False

    def now_ms() -> float:
        return simulation.clock.now_ms

    cost = cost_of(weights, base_times, mean_ratios(usual, base_times))
    horizon_ms = 1e3 * cluster.simulated.horizon_s
    with Clairvoyant(cluster.policy(way), cost, now_ms, horizon_ms, note) as foresight:
        simulation = cluster.simulation(way, foresight, place.seed)
        simulation.run(window)
    return found


def _observed(features: Features, decision: Decision) -> tuple[float, ...]:
    numbers = [getattr(features, name) for name in _FIELDS]
    return (
        *(math.nan if number is None else float(number) for number in numbers),
        *_costs(decision.assessment),
    )


def _costs(assessment: Assessment | None) -> tuple[float, ...]:
    if assessment is None:
        return (math.nan,) * 8
    remote, local = assessment.remote, assessment.local
    return (
        *(remote.ttft_ms, local.ttft_ms, remote.ttft_ms - local.ttft_ms),
        *(remote.tpot_ms, local.tpot_ms, remote.tpot_ms - local.tpot_ms),
        *(assessment.score.ttft_saved, assessment.score.tpot_lost),
    )
