"""Rounds of measured bursts, all ways in each, as raw rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from ppd.ann import batch
from ppd.ann.lanes import Target
from ppd.ann.schedule import Stage
from ppd.ann.space import Rows

from . import bursts, ideal
from .arrivals import draw
from .orders import Way
from .waits import Waits

_WARM_UP_LOAD, _WARM_UP_S = 0.3, 1.0
_TRIES = 5  # of the capacity; the first fills the caches
_SAMPLE = 200  # answers of a run that are compared with a plain search


class Rounds:
    """Rounds of bursts over one index.

    Args:
        target: what is searched.
        queries: in the users' space.
        threads: that search.
        seconds: duration of each history.
        seed: of the first round; each round has a history of its own.

    Attributes:
        capacity: searches a second that the threads finish one after the other.
    """

    def __init__(
        self, target: Target, queries: Rows, threads: int, seconds: float, seed: int
    ) -> None:
        self._target = target
        self._queries = queries
        self._moved = target.snapshot.space.queries(queries)
        self._threads = threads
        self._seconds = seconds
        self._seed = seed
        tries = [bursts.capacity(target, self._moved, threads, seed) for _ in range(_TRIES)]
        self.capacity = statistics.median(tries)
        count = queries.shape[0]
        few = draw(_WARM_UP_LOAD * self.capacity, _WARM_UP_S, count, seed)
        for way in Way:  # each compiles what it calls
            bursts.run(way, target, self._moved, few, threads)

    def rows(self, load: float, number: int) -> Iterator[dict[str, Any]]:
        """Serve one history in every way, and yield a row for each way and stage."""
        count = self._queries.shape[0]
        arrivals = draw(load * self.capacity, self._seconds, count, self._seed + number)
        common = {"what": "bursts", "load": load, "round": number, "capacity": self.capacity}
        taken = ideal.costs(self._target, self._moved, self._threads)
        computed = ideal.waits(arrivals, taken, self._threads)
        yield from _by_stage({**common, "way": "ideal", "scheduling_us": 0.0}, computed)
        ways = list(Way)
        turn = number % len(ways)  # no way is always the first one
        for way in ways[turn:] + ways[:turn]:
            served = bursts.run(way, self._target, self._moved, arrivals, self._threads)
            of_all = {
                "searches": len(arrivals),
                "n": self._target.snapshot.count,
                "scheduling_us": served.scheduling_us,
                "choosing_us": served.choosing_us,
                "identical_ids": self._identical(served),
            }
            yield from _by_stage({**common, "way": way, **of_all}, served.waits())

    def _identical(self, served: bursts.Served) -> bool:
        """Whether a sample of what was found among others is what is found alone."""
        for answer in served.answered[:: max(1, len(served.answered) // _SAMPLE)]:
            query, limit = self._queries[answer.query : answer.query + 1], len(answer.nodes)
            _, nodes = batch.search(self._target, query, limit, answer.itopk, lanes=1)
            if tuple(nodes[0].tolist()) != answer.nodes:
                return False
        return True


def _by_stage(of_both: dict[str, Any], waits: Waits) -> Iterator[dict[str, Any]]:
    of_all = {**of_both, "missed_of_all": waits.missed_of_all()}
    for stage in Stage:
        fields = {"p99_us": waits.p99_us(stage), "missed": waits.missed(stage)}
        yield {**of_all, "stage": stage, **fields}
