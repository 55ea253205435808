"""How long the searches of a history waited for their answers, by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ppd.ann.schedule import Scheduler, Stage
from ppd.ann.searches import Search

from .arrivals import BUDGET_S


class Ended(NamedTuple):
    """A search that has ended, in seconds of the history."""

    stage: Stage
    arrived_s: float
    at_s: float


# Called before each choice of ours: with the seconds of the history, the scheduler, and the
# searches in the order of their ends.
BeforeTurn = Callable[[float, Scheduler[Search], Sequence[Ended]], None]


def unchanged(now_s: float, scheduler: Scheduler[Search], ended: Sequence[Ended]) -> None:
    """Change nothing before a choice."""


@dataclass(slots=True)
class Waits:
    """Latencies of a history.

    Attributes:
        of: seconds from arrival to answer, of each search of a stage.
    """

    of: dict[Stage, list[float]] = field(default_factory=lambda: {stage: [] for stage in Stage})

    def add(self, stage: Stage, seconds: float) -> None:
        """Add a search that was answered."""
        self.of[stage].append(seconds)

    def count(self) -> int:
        """Return the number of searches."""
        return sum(map(len, self.of.values()))

    def p99_us(self, stage: Stage) -> float:
        """Return the 99th percentile of a stage's latencies, in microseconds."""
        return float(np.percentile(self.of[stage], 99)) * 1e6

    def missed(self, stage: Stage) -> float:
        """Return the share of a stage's searches that took longer than its budget."""
        return float(np.mean(np.array(self.of[stage]) > BUDGET_S[stage]))

    def missed_of_all(self) -> float:
        """Return the share of all searches that took longer than their budgets."""
        return sum(len(of) * self.missed(stage) for stage, of in self.of.items()) / self.count()
