"""The PPD paper's measurement, simulated: 17 configurations, 18 workloads, 10 rates.

Its load generator is copied with its faults, because they are in its numbers: ten seconds of
arrivals, drawn anew for each configuration, fifty connections, a clock that runs while a turn
waits for one, prompts longer than they are called, replies sent back as text (freelulul/vllm-ppd,
``scripts/benchmark/comprehensive_benchmark.py``).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ppd.decision import Route
from ppd.policies import static_policy

from .cost_model import CostModel
from .rows import TurnRow
from .simulator import Simulation
from .traffic import Clients, Workload, lengthened, poisson
from .workers import Shape

# By what moves later turns: nothing does, none, some, all of them are local, or part of the
# cluster is replicas.
CATEGORIES = {
    "4R": ("4R",),
    "x=0": ("1P_3D", "2P_2D", "3P_1D"),
    "partial": ("1P_2D_1pD", "1P_1D_2pD", "2P_1D_1pD"),
    "x=1": ("1P_3pD", "2P_2pD", "3P_1pD"),
    "hybrid": (
        "1R_1P_2D",
        "1R_1P_1D_1pD",
        "1R_1P_2pD",
        "1R_2P_1D",
        "1R_2P_1pD",
        "2R_1P_1D",
        "2R_1P_1pD",
    ),
}
CONFIGURATIONS = tuple(name for names in CATEGORIES.values() for name in names)

_PROMPTS_LONGER = 1.22  # its generator counts 0.75 words to a token, and adds a frame


@dataclass(frozen=True, slots=True)
class Harness:
    """How the paper's harness sends requests.

    Attributes:
        duration_s: of arrivals.
        connections: of the clients; 0: no bound.
        same_arrivals: in every configuration; the paper draws them anew.
    """

    duration_s: float = 10.0
    connections: int = 50
    timeout_s: float = 120.0
    prompts_longer: float = _PROMPTS_LONGER
    replies_lost: bool = True
    same_arrivals: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One place in the paper's grid."""

    configuration: str
    workload: Workload
    qps: float
    seed: int


@dataclass(frozen=True, slots=True)
class PointRow:
    """The results of one point, in milliseconds: what the paper's harness reports, and more.

    Attributes:
        ok_share: of the turns that were begun.
        tpot_ms: the mean over turns of both kinds that had more than one token.
        tokens_per_s: generated, over the time until the last turn ended.
    """

    configuration: str
    workload: str
    qps: float
    seed: int
    turns: int
    ok_share: float
    t1_ttft_p50_ms: float | None
    t1_ttft_ms: float | None
    t2_ttft_ms: float | None
    t2_ttft_p50_ms: float | None
    t2_ttft_p99_ms: float | None
    tpot_ms: float | None
    t1_tpot_p50_ms: float | None
    t2_tpot_ms: float | None
    tokens_per_s: float
    moved_tokens: int
    evicted_tokens: int
    local_turns: int


def points(
    workloads: Sequence[Workload], configurations: Sequence[str], seed: int
) -> Iterator[Point]:
    """Yield all points of a grid."""
    for configuration, workload in product(configurations, workloads):
        for qps in workload.qps:
            yield Point(configuration, workload, qps, seed)


def measure(point: Point, harness: Harness, costs: CostModel) -> PointRow:
    """Simulate one point."""
    shape = Shape.parse(point.configuration)
    policy = static_policy("replica" if shape.replica == shape.workers else "full")
    clients = Clients(
        harness.connections or None, harness.timeout_s, replies_lost=harness.replies_lost
    )
    simulation = Simulation(costs, shape, policy, clients, point.seed)
    workload = lengthened(point.workload, harness.prompts_longer)
    arrivals = "" if harness.same_arrivals else point.configuration
    source = random.Random(f"{workload.name}/{point.qps}/{point.seed}/{arrivals}")
    result = simulation.run(poisson(workload, point.qps, harness.duration_s, source))
    good = [row for row in result.rows if not row.failed]
    first = [row for row in good if row.turn == 1]
    later = [row for row in good if row.turn > 1]
    spread = sorted(row.ttft_ms for row in later)
    return PointRow(
        configuration=point.configuration,
        workload=workload.name,
        qps=point.qps,
        seed=point.seed,
        turns=len(result.rows),
        ok_share=len(good) / max(1, len(result.rows)),
        t1_ttft_p50_ms=_median([row.ttft_ms for row in first]),
        t1_ttft_ms=_mean([row.ttft_ms for row in first]),
        t2_ttft_ms=_mean(spread),
        t2_ttft_p50_ms=_median(spread),
        t2_ttft_p99_ms=spread[min(len(spread) - 1, int(0.99 * len(spread)))] if spread else None,
        tpot_ms=_mean(_tpots(good)),
        t1_tpot_p50_ms=_median(_tpots(first)),
        t2_tpot_ms=_mean(_tpots(later)),
        tokens_per_s=sum(row.output_tokens for row in good) / max(1e-9, result.ended_s),
        moved_tokens=result.moved_tokens,
        evicted_tokens=result.evicted_tokens,
        local_turns=sum(row.route is Route.LOCAL for row in result.rows),
    )


def _tpots(rows: list[TurnRow]) -> list[float]:
    return [row.tpot_ms for row in rows if row.output_tokens > 1]


def _mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
