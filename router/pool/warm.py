"""Compilation of all search kernels before the first search."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.lanes import Backend, Target
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage
from ppd.ann.searches import Ending, Search
from ppd.errors import IndexFileError


def compile_for(target: Target, backend: Backend) -> None:
    """Run one search of each kind, which compiles its kernels.

    The kinds are a scan of rows and, if the target has a graph, a graph search of each width.

    Raises:
        IndexFileError: the GPU has not enough memory.
    """
    space = target.snapshot.space
    query = space.queries(np.zeros((1, space.dimensions), np.float32))
    scheduler: Scheduler[Search] = Scheduler(Bounds(), Controls(), lambda: 1e-6)
    engine = Engine(scheduler, Pace(), lambda: 0.0, StepShape(), backend, max(backend.widths))
    no_rows = np.empty(0, np.int32)
    kinds: list[tuple[int, NDArray[np.int32] | None]] = [(1, no_rows)]
    if target.snapshot.has_graph:
        kinds += [(width, None) for width in backend.widths]
    for itopk, among in kinds:
        scheduler.offer(
            Search(
                Stage.DECODE,
                0.0,
                math.inf,
                1.0,
                target=target,
                query=query,
                itopk=itopk,
                limit=1,
                among=among,
            )
        )
    ended = 0
    while ended < len(kinds):
        for found in engine.step(*engine.choose(0.0)):
            if found.ending is Ending.FAILED:
                raise IndexFileError(found.error)
            ended += 1
