"""What queueing alone makes of the bursts' arrivals, first come, first served.

Each search takes a core for as long as its compiled steps do when a full batch shares them and the
other cores do the same, and nothing else costs anything: no Python, no waiting for a step to end,
no order that is kept.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ppd.ann import process
from ppd.ann.lanes import CpuLaneSet, Target
from ppd.ann.schedule import Stage
from ppd.ann.space import Rows

from .arrivals import KINDS, Arrival
from .orders import BATCH
from .waits import Waits

Costs = Mapping[tuple[int, int], float]  # seconds of one core, by itopk and limit


def costs(target: Target, moved: Rows, cores: int) -> Costs:
    """Measure what each kind of query costs on each of so many cores, all busy.

    Args:
        moved: queries in the space's rows.
    """
    kinds = sorted({kind for stage in Stage for kind in KINDS[stage]})
    widest = max(itopk for itopk, _ in kinds)
    together = threading.Barrier(cores)

    def one_core(core: int) -> list[float]:
        process.stay_on(core)
        lanes = CpuLaneSet(target.snapshot, BATCH, widest)
        taken_s = []
        for itopk, limit in kinds:
            near = np.empty((moved.shape[0], limit), np.float32)
            nodes = np.empty((moved.shape[0], limit), np.int32)
            together.wait()
            began_s = time.perf_counter()
            lanes.search_all(moved, itopk, target.hidden, near, nodes)
            taken_s.append((time.perf_counter() - began_s) / moved.shape[0])
        return taken_s

    own = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(cores) as pool:
        taken_s = list(pool.map(one_core, itertools.islice(own, cores)))
    return dict(zip(kinds, np.mean(taken_s, axis=0).tolist(), strict=True))


def waits(arrivals: Sequence[Arrival], taken: Costs, cores: int) -> Waits:
    """Compute the latencies, if all searches are served in the order they come."""
    free_s = [0.0] * cores
    waits = Waits()
    for arrival in arrivals:
        ends_s = max(heapq.heappop(free_s), arrival.at_s) + taken[arrival.itopk, arrival.limit]
        heapq.heappush(free_s, ends_s)
        waits.add(arrival.stage, ends_s - arrival.at_s)
    return waits
