"""Drawn histories of searches that arrive in bursts. Nothing here searches or has a clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ppd.ann.schedule import Stage

# A later answer counts as missed. No search is cut.
BUDGET_S = {Stage.PREFILL: 0.005, Stage.DECODE: 0.05}
KINDS = {  # (itopk, limit), drawn alike
    Stage.PREFILL: ((32, 10), (64, 10)),
    Stage.DECODE: ((64, 10), (128, 10), (256, 50)),
}
_BURST, _QUIET_S, _BURST_S = 5.0, 0.45, 0.05  # rate in bursts, and how long each lasts
_PREFILL_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Arrival:
    """A search that arrives."""

    at_s: float
    stage: Stage
    query: int
    itopk: int
    limit: int


def draw(rate: float, seconds: float, queries: int, seed: int, wider: int = 1) -> list[Arrival]:
    """Draw Poisson arrivals, five times as dense in bursts.

    Args:
        rate: arrivals a second on average.
        seconds: duration.
        queries: number of different queries.
        seed: of the draw.
        wider: factor of itopk in decode searches.
    """
    source = random.Random(seed)
    period_s = _QUIET_S + _BURST_S
    quiet_rate = rate * period_s / (_QUIET_S + _BURST * _BURST_S)
    arrivals: list[Arrival] = []
    now_s = 0.0
    while True:
        in_burst = now_s % period_s >= _QUIET_S
        now_s += source.expovariate(quiet_rate * (_BURST if in_burst else 1.0))
        if now_s >= seconds:
            return arrivals
        stage = Stage.PREFILL if source.random() < _PREFILL_SHARE else Stage.DECODE
        itopk, limit = source.choice(KINDS[stage])
        if stage is Stage.DECODE:
            itopk *= wider
        arrivals.append(Arrival(now_s, stage, source.randrange(queries), itopk, limit))
