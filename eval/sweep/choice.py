"""What to measure next: the cell whose decision is least certain.

Both routes' costs differ by factors that vary smoothly over the grid, so few cells determine the
others. The surfaces of the two log ratios (local to remote, of TTFT and of TPOT) give each cell a
score of Algorithm 1 with an error, and so the chance that its sign is wrong: after Gotovos et al.,
"Active learning for level set estimation" (IJCAI 2013). A measured cell is uncertain, too, as long
as its seeds disagree: then it is measured with another one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppd.score import Weights
from ppd.table import Costs

from ..certainty import noisy
from ..surface import Array, Cell, Surface, cells_of, places
from .config import LOCAL, REMOTE, Place, Run, SweepConfig

_FIT_AGAIN = 1.25  # times as many measurements as last time

Medians = Mapping[Run, tuple[float, float] | None]  # TTFT and TPOT in ms; None: nothing came


@dataclass(frozen=True, slots=True)
class Job:
    """One place with one seed, under all policies.

    Policies are compared, so they are measured one right after the other.
    """

    place: Place
    seed: int

    def runs(self, policies: Sequence[str]) -> list[Run]:
        """The order alternates: what comes second may find a warmer machine."""
        c, n, o = self.place.workload
        number = self.seed + c + n + o + (-1 if self.place.qps is None else self.place.qps)
        ordered = policies if number % 2 == 0 else reversed(policies)
        return [Run(self.place, policy, self.seed) for policy in ordered]


class Grid:
    """The choice of everything, seeds outermost: each cell is measured once before any twice.

    Then come ``more_seeds``, one after the other, of cells in which noise decides.
    """

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        rates = (None, *range(len(config.axes.qps)))
        self._jobs = [
            Job(Place(workload, qps), seed)
            for seed in config.seeds
            for workload in config.workloads()
            for qps in rates
        ]
        self._policies = config.policies

    def next(self, medians: Medians, busy: Collection[Job]) -> Job | None:
        """The next one; None if all is measured or ``busy``."""
        left = self._open(medians) or self._doubtful(medians)
        return next((job for job in left if job not in busy), None)

    def left(self, medians: Medians) -> int:
        """How many jobs there are to come; the results may ask for more seeds."""
        return len(self._open(medians) or self._doubtful(medians))

    def _open(self, medians: Medians) -> list[Job]:
        return [job for job in self._jobs if not done(job, self._policies, medians)]

    def _doubtful(self, medians: Medians) -> list[Job]:
        """One more seed of each cell that noise decides."""
        if not self._config.more_seeds:
            return []
        by_seed = {cell: self._by_seed(cell, medians) for cell in cells_of(self._config.axes)}
        found = []
        for cell in sorted(noisy(by_seed)):
            jobs = (Job(Place(cell[:3], cell[3]), seed) for seed in self._config.more_seeds)
            found += [job for job in jobs if not done(job, self._policies, medians)][:1]
        return found

    def _by_seed(self, cell: Cell, medians: Medians) -> list[tuple[Costs, Costs]]:
        """Costs of the remote and of the local route with each seed that was measured."""
        jobs = (
            Job(Place(cell[:3], cell[3]), seed)
            for seed in (*self._config.seeds, *self._config.more_seeds)
        )
        found = []
        for job in jobs:
            remote, local = (
                medians.get(Run(job.place, policy, job.seed)) for policy in (REMOTE, LOCAL)
            )
            if remote and local:
                found.append((Costs(*remote, 1.0, 1.0), Costs(*local, 1.0, 1.0)))
        return found


def done(job: Job, policies: Sequence[str], medians: Medians) -> bool:
    """Return whether a job is measured with all policies."""
    return all(run in medians for run in job.runs(policies))


class Adaptive:
    """The choice of cells spread over the grid first, then always the least certain one.

    Each measured workload is also measured quiet, with one seed.
    """

    def __init__(self, config: SweepConfig) -> None:
        assert config.adaptive is not None
        self._config = config
        self._wanted = config.adaptive
        self._cells = cells_of(config.axes)
        self._places = places(config.axes)
        first = max(2, math.ceil(self._wanted.start * len(self._cells)))
        self._first = [self._cells[i] for i in _spread_out(self._places, first)]
        self._fitted: list[Surface] = []
        self._fitted_to = 0  # measurements, when lengths and noise were last looked for
        self._most = max(first, int(self._wanted.most * len(self._cells) * len(config.seeds)))

    def next(self, medians: Medians, busy: Collection[Job]) -> Job | None:
        """The next one; None if all is certain enough, or must wait for those that are ``busy``."""
        taken = {job.place for job in busy}
        measured = self._measured(medians)
        for cell in (*self._first, *measured):
            quiet = Job(Place(cell[:3], None), self._config.seeds[0])
            if not done(quiet, self._config.policies, medians) and quiet not in busy:
                return quiet
        for cell in self._first:
            if not measured.get(cell) and (job := self._job(cell, 0)).place not in taken:
                return job
        if any(not measured.get(cell) for cell in self._first):
            return None
        if sum(map(len, measured.values())) + len(busy) >= self._most:
            return None
        wrong = self.chance_of_wrong(medians)
        for i in np.argsort(-wrong):
            cell = self._cells[int(i)]
            seeds = len(measured.get(cell, ()))
            if wrong[i] <= self._wanted.wrong:
                return None
            if seeds < len(self._config.seeds):
                job = self._job(cell, seeds)
                if job.place not in taken:
                    return job
        return None

    def left(self, medians: Medians) -> int:
        """Return how many jobs are left at most; most often fewer will do."""
        used = sum(map(len, self._measured(medians).values()))
        return max(0, self._most - used)

    def chance_of_wrong(self, medians: Medians) -> Array:
        """Return each cell's chance that its route is wrong, for the worst of the weightings."""
        measured = self._measured(medians)
        index = {cell: i for i, cell in enumerate(self._cells)}
        ratios = [(index[cell], pair) for cell, pairs in measured.items() for pair in pairs]
        known = [(i, pair) for i, pair in ratios if pair is not None]
        if len(known) < 2:
            return np.full(len(self._cells), 0.5)
        at = self._places[[i for i, _ in known]]
        again = len(known) >= _FIT_AGAIN * self._fitted_to
        likes = [None, None] if again else self._fitted
        self._fitted = [
            Surface.through(at, [pair[which] for _, pair in known], likes[which])
            for which in (0, 1)
        ]
        if again:
            self._fitted_to = len(known)
        ttft, tpot = (surface.at(self._places) for surface in self._fitted)
        chances = [chance_of_wrong(weighting, ttft, tpot) for weighting in self._wanted.weightings]
        worst: Array = np.maximum.reduce(chances)
        return worst

    def _job(self, cell: Cell, seeds_done: int) -> Job:
        return Job(Place(cell[:3], cell[3]), self._config.seeds[seeds_done])

    def _measured(self, medians: Medians) -> dict[Cell, list[tuple[float, float] | None]]:
        """Log ratios of each cell's seeds, in the order of the seeds; up to the first that is
        missing. None: one route gave nothing."""
        found: dict[Cell, list[tuple[float, float] | None]] = {}
        for cell in self._cells:
            for number in range(len(self._config.seeds)):
                job = self._job(cell, number)
                if not done(job, self._config.policies, medians):
                    break
                local = medians[Run(job.place, LOCAL, job.seed)]
                remote = medians[Run(job.place, REMOTE, job.seed)]
                found.setdefault(cell, []).append(log_ratios(remote, local))
        return found


def choice_of(config: SweepConfig) -> Grid | Adaptive:
    """Return what chooses the jobs of a sweep."""
    return Grid(config) if config.adaptive is None else Adaptive(config)


def log_ratios(
    remote: tuple[float, float] | None, local: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the log ratios of TTFT and TPOT, local to remote; None where there is none."""
    if remote is None or local is None or min(*remote, *local) <= 0:
        return None
    return math.log(local[0] / remote[0]), math.log(local[1] / remote[1])


def chance_of_wrong(
    weights: Weights, ttft: tuple[Array, Array], tpot: tuple[Array, Array]
) -> Array:
    """Return the chance that a score has the wrong sign.

    Args:
        ttft, tpot: mean and standard deviation of the log ratio, local to remote.
    """
    saved, lost = np.exp(ttft[0]), np.exp(tpot[0])
    score = weights.ttft * (1.0 - saved) - weights.tpot * (lost - 1.0)
    # To the first order, the errors of the two taken as independent.
    sd = np.hypot(weights.ttft * saved * ttft[1], weights.tpot * lost * tpot[1])
    deviations = np.abs(score) / np.maximum(sd, 1e-9)
    return np.array([0.5 * math.erfc(deviation / math.sqrt(2.0)) for deviation in deviations])


def _spread_out(at: Array, n: int) -> list[int]:
    """``n`` of the places, each as far as can be from those before it; the corners first."""
    chosen = [0]
    nearest = np.linalg.norm(at - at[0], axis=1)
    while len(chosen) < min(n, len(at)):
        furthest = int(np.argmax(nearest))
        chosen.append(furthest)
        nearest = np.minimum(nearest, np.linalg.norm(at - at[furthest], axis=1))
    return chosen
