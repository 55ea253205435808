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

QUANTILES = {"p50": 0.5, "p90": 0.9}
EACH = "each"  # geometric means over turns, each over the same turn of the base
MISSED = "missed"  # the share of turns that miss a target

Array = NDArray[np.float64]
Counts = NDArray[np.int64]  # by conversation: how often it was drawn
Place = tuple[int, int]  # seed and conversation


@dataclass(frozen=True, slots=True)
class Turns:
    """Later turns of one way on one trace, by conversation; each an array of (TTFT, TPOT)."""

    by_place: Mapping[Place, Array]
    failed: int

    def of(self, places: Sequence[Place]) -> Array:
        """Return the turns of some conversations, shape (turns, 2)."""
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


class Sample:
    """Conversations that every way served, from which others are drawn.

    Sorting and logarithms are done once, for all draws.

    Args:
        every: the ways by name. All have as many turns of a conversation.
        places: the conversations.
    """

    def __init__(self, every: Mapping[str, Turns], places: Sequence[Place]) -> None:
        base = every[BASE]
        turns = [len(base.by_place[place]) for place in places]
        self._place = np.repeat(np.arange(len(places)), turns)
        self._starts = np.concatenate([[0], np.cumsum(turns)[:-1]])
        self._turns = np.array(turns)
        self._times = {name: one.of(places) for name, one in every.items()}
        self._sorted = {name: _sorted(times) for name, times in self._times.items()}
        self._logs = {name: self._log_sums(name) for name in every}
        self._missed: dict[tuple[str, Targets], Array] = {}  # turns, by conversation

    def quantiles(self, way: str, counts: Counts) -> Array:
        """Return TTFT and TPOT, shape (quantiles, 2), interpolated as by ``numpy.percentile``."""
        drawn = counts[self._place]
        found = [
            [
                _quantile(values, np.cumsum(drawn[order]), share)
                for order, values in self._sorted[way]
            ]
            for share in QUANTILES.values()
        ]
        return np.array(found)

    def costs(self, questions: Sequence[Question], counts: Counts) -> dict[str, Array]:
        """Return the cost of each way by every question, over all turns that were drawn."""
        base = self._figures(BASE, counts)
        return {
            name: np.array(list(self._answers(questions, name, counts, base)))
            for name in self._times
        }

    def _answers(
        self, questions: Sequence[Question], way: str, counts: Counts, base: Mapping[str, Array]
    ) -> Iterator[float]:
        figures = self._figures(way, counts)
        for question in questions:
            match question.objective:
                case Weights() as weights:
                    ttft, tpot = figures[question.at] / base[question.at]
                    yield float(weights.ttft * ttft + weights.tpot * tpot)
                case Targets() as targets:
                    if (missed := self._missed.get((way, targets))) is None:
                        missed = self._by_place(_missed(targets, self._times[way]))
                        self._missed[way, targets] = missed
                    yield float(counts @ missed / (counts @ self._turns))
                case _:
                    assert_never(question.objective)

    def _figures(self, way: str, counts: Counts) -> dict[str, Array]:
        """By statistic TTFT and TPOT: quantiles, geometric means of shares of the base's turns."""
        sums, known = self._logs[way]
        each: Array = np.exp(counts @ sums / np.maximum(1, counts @ known))
        return dict(zip(QUANTILES, self.quantiles(way, counts), strict=True)) | {EACH: each}

    def _log_sums(self, way: str) -> tuple[Array, Array]:
        """By conversation, of turns with both times: logarithms of shares of the base, and number.

        A reply of one token has no TPOT.
        """
        times, base = self._times[way], self._times[BASE]
        known = (times > 0) & (base > 0)
        logs = np.log(times, where=known, out=np.zeros_like(times))
        logs -= np.log(base, where=known, out=np.zeros_like(base))
        return self._by_place(logs), self._by_place(known.astype(np.float64))

    def _by_place(self, values: Array) -> Array:
        """Add values of turns up, by conversation."""
        added: Array = np.add.reduceat(values, self._starts, axis=0)
        return added


def once(places: Sequence[Place]) -> Counts:
    """Return the draw that has each conversation once."""
    return np.ones(len(places), np.int64)


def _missed(targets: Targets, times: Array) -> Array:
    """Whether turns miss a target, as 0 and 1; a reply of one token misses none of TPOT."""
    given = (targets.ttft_ms, targets.tpot_ms)
    bounds = [math.inf if target is None else target for target in given]
    missed = (times[:, 0] > bounds[0]) | (times[:, 1] > bounds[1])
    return missed.astype(np.float64)


def _sorted(times: Array) -> list[tuple[NDArray[np.intp], Array]]:
    """Of TTFT and TPOT: the order of turns, and their times in it."""
    orders = [np.argsort(column, kind="stable") for column in times.T]
    return [(order, column[order]) for order, column in zip(orders, times.T, strict=True)]


def _quantile(values: Array, upto: Counts, share: float) -> float:
    """Interpolate a quantile of values that were drawn more than once.

    Args:
        values: sorted.
        upto: how often each value and those before it were drawn.
    """
    at = share * (upto[-1] - 1)
    below = math.floor(at)
    low, high = values[np.searchsorted(upto, [below, min(below + 1, upto[-1] - 1)], side="right")]
    return float(low + (at - below) * (high - low))
