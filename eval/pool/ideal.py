"""What queueing alone makes of the bursts' arrivals, first come, first served.

Each search takes a core for as long as its compiled steps do when a full batch shares them, and
nothing else costs anything: no Python, no waiting for a step to end, no order that is kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ppd.ann.lanes import CpuLaneSet, Target
from ppd.ann.schedule import Stage
from ppd.ann.space import Rows

from .bursts import BATCH, KINDS, Arrival

Costs = Mapping[tuple[int, int], float]  # seconds of one core, by itopk and limit


def costs(target: Target, moved: Rows) -> Costs:
    """On one core, as fast as it is now.

    Args:
        moved: queries in the space's rows.
    """
    kinds = sorted({kind for stage in Stage for kind in KINDS[stage]})
    lanes = CpuLaneSet(target.snapshot, BATCH, max(itopk for itopk, _ in kinds))
    taken: dict[tuple[int, int], float] = {}
    for itopk, limit in kinds:
        near = np.empty((moved.shape[0], limit), np.float32)
        nodes = np.empty((moved.shape[0], limit), np.int32)
        began_s = time.perf_counter()
        lanes.search_all(moved, itopk, target.hidden, near, nodes)
        taken[itopk, limit] = (time.perf_counter() - began_s) / moved.shape[0]
    return taken


def p99_us(arrivals: Sequence[Arrival], taken: Costs, cores: int, of: Stage) -> float:
    """Of one stage's searches, if all are served in the order they come."""
    free_s = [0.0] * cores
    took_s = []
    for one in arrivals:
        ends_s = max(heapq.heappop(free_s), one.at_s) + taken[one.itopk, one.limit]
        heapq.heappush(free_s, ends_s)
        if one.stage is of:
            took_s.append(ends_s - one.at_s)
    return float(np.percentile(took_s, 99)) * 1e6
