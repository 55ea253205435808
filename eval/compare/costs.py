"""What a way of serving costs: statistics of its later turns, relative to those of ``pd``.

With weights the cost is ``w_ttft * TTFT / TTFT_pd + w_tpot * TPOT / TPOT_pd``, at the median and
the 90th percentile. In simulations it is also that of geometric means: of what each turn took,
divided by the same turn of ``pd``. An arithmetic mean of such ratios grows with their spread alone,
so that of two runs of one policy each costs more than the other (Fleming and Wallace, "How not to
lie with statistics", CACM 29(3), 1986). With targets the cost is the share of turns that miss one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from ppd.score import Objective, Targets, Weights

from .config import BASE, Comparison

QUANTILES = {"p50": 50.0, "p90": 90.0}
EACH = "each"  # geometric means over turns, each over the same turn of the base
MISSED = "missed"  # the share of turns that miss a target

Array = NDArray[np.float64]
Place = tuple[int, int]  # seed and conversation


@dataclass(frozen=True, slots=True)
class Turns:
    """Later turns of one way on one trace, by conversation; each an array of (TTFT, TPOT)."""

    by_place: Mapping[Place, Array]
    failed: int

    def draw(self, places: Sequence[Place]) -> Array:
        """Return the turns of some conversations; one may be drawn several times."""
        return np.concatenate([self.by_place[place] for place in places])


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared: by an objective, at a statistic of all turns."""

    objective: Objective
    at: str


def questions_of(config: Comparison) -> Iterator[Question]:
    """Yield what a comparison asks."""
    statistics = [*QUANTILES, EACH] if config.simulated is not None else list(QUANTILES)
    for weights in config.weightings:
        yield from (Question(weights, at) for at in statistics)
    yield from (Question(targets, MISSED) for targets in config.targets)


def costs_of(
    questions: Sequence[Question], every: Mapping[str, Turns], places: Sequence[Place]
) -> dict[str, Array]:
    """Return the cost of each way by every question, over all turns of some conversations."""
    base = every[BASE].draw(places)
    base_figures = _figures_of(base, base)
    return {
        name: np.array(list(_answers(questions, turns.draw(places), base, base_figures)))
        for name, turns in every.items()
    }


def _answers(
    questions: Sequence[Question], turns: Array, base: Array, base_figures: Mapping[str, Array]
) -> Iterator[float]:
    figures = _figures_of(turns, base)
    for question in questions:
        match question.objective:
            case Weights() as weights:
                ttft, tpot = figures[question.at] / base_figures[question.at]
                yield float(weights.ttft * ttft + weights.tpot * tpot)
            case Targets() as targets:
                yield _missed(targets, turns)
            case _:
                assert_never(question.objective)


def _figures_of(turns: Array, base: Array) -> dict[str, Array]:
    """By statistic TTFT and TPOT: quantiles, and geometric means of shares of the base's turns."""
    with_both = (turns > 0) & (base > 0)  # a reply of one token has no TPOT
    logs = np.log(turns, where=with_both, out=np.zeros_like(turns))
    logs -= np.log(base, where=with_both, out=np.zeros_like(base))
    each = np.exp(logs.sum(axis=0) / np.maximum(1, with_both.sum(axis=0)))
    return dict(zip(QUANTILES, quantiles(turns), strict=True)) | {EACH: each}


def _missed(targets: Targets, turns: Array) -> float:
    """The share of turns that miss a target; a reply of one token misses none of TPOT."""
    given = (targets.ttft_ms, targets.tpot_ms)
    bounds = [math.inf if target is None else target for target in given]
    return float((turns > bounds).any(axis=1).mean())


def quantiles(turns: Array) -> Array:
    """Shape (quantiles, 2): TTFT and TPOT."""
    found: Array = np.percentile(turns, list(QUANTILES.values()), axis=0)
    return found
