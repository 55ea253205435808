"""Studies that four GPUs cannot show: clusters of any size, pauses, traces, the cheapest cluster.

Clients are open loop here, replies come back as they were generated, and only the KV that a decode
worker lacks is transferred, as when SGLang with a decode radix cache serves through our router. The
costs are those of the paper's machine.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ppd.decision import Policy, Reason, Route
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Objective, Targets, Weights
from ppd.table import Table
from ppd.table_policy import TablePolicy

from .cache import HostMemory
from .cost_model import Costs
from .outages import Outage
from .rows import TurnRow
from .simulator import Simulation
from .traffic import Clients, Conversation, Workload, mixed, traced
from .workers import Chunking, PlacementRule, Shape

PACED_TOKENS = 2048  # ppd-worker's --chunked-prefill-size on GPUs


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations like ``workloads``, or those of a ``trace``, each ``copies`` times."""

    workloads: tuple[Workload, ...] = ()
    qps: float = 0.0
    duration_s: float = 0.0
    think_s: float | None = None
    trace: Path | None = None
    copies: int = 1

    def conversations(self, seed: int) -> Iterable[Conversation]:
        """Return the conversations of a seed."""
        if self.trace is not None:
            return traced(self.trace, self.copies)
        source = random.Random(seed)
        return mixed(self.workloads, self.qps, self.duration_s, self.think_s, source)


@dataclass(frozen=True, slots=True)
class Routing:
    """How turns are routed, beyond the policy's name.

    Attributes:
        table: of the ``ppd`` policy.
        outages: of workers.
        max_resumptions: of a stream whose worker has died.
    """

    table: Table | None = None
    objective: Objective = field(default_factory=Weights)
    placement: PlacementRule = PlacementRule.CHANCE
    outages: tuple[Outage, ...] = ()
    max_resumptions: int = 0

    def policy(self, name: str) -> Policy:
        """Return a new policy: the table's adapts to its traffic.

        Raises:
            ConfigError: there is no such policy, or no table for it.
        """
        if name != "ppd":
            return static_policy(name)
        if self.table is None:
            raise ConfigError("the policy ppd goes by a decision table: --table FILE")
        return TablePolicy(self.table)


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One cluster under one traffic.

    Attributes:
        qps: turns a second that arrived, per worker.
        turns: those that failed included; times and shares are of the others.
        failed_turns: turns whose outcome is not ``ok``.
        ok_share: turns that met the targets; None without targets.
        lost_share: later turns that found nothing cached where they were prefilled, or too little
            for a local turn.
        gpu_s_per_mtoken: time of all GPUs for a million generated tokens.
        event_s: wall time of the simulation.
    """

    shape: str
    policy: str
    placement: str
    think_s: float | None
    workers: int
    turns: int
    failed_turns: int
    qps: float
    t1_ttft_p50_ms: float
    t2_ttft_p50_ms: float
    t2_ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    ok_share: float | None
    local_share: float
    lost_share: float
    moved_tokens_per_turn: float
    gpu_s_per_mtoken: float
    event_s: float
    memory_mb: float


def study(
    costs: Costs,
    shape: str,
    policy: str,
    traffic: Traffic,
    seed: int,
    targets: Targets | None = None,
    routing: Routing | None = None,
    host: HostMemory | None = None,
) -> StudyRow:
    """Simulate one cluster under some traffic.

    Args:
        host: memory for KV on the host of each worker.

    Raises:
        ConfigError: there is no such shape or policy, or no table for it; or every turn failed.
    """
    routing = routing or Routing()
    started_s = time.perf_counter()
    parsed = Shape.parse(shape)
    simulation = Simulation(
        costs,
        parsed,
        routing.policy(policy),
        Clients(),
        seed,
        objective=routing.objective,
        delta=True,
        chunking=Chunking(paced_tokens=PACED_TOKENS),
        placement=routing.placement,
        outages=routing.outages,
        max_resumptions=routing.max_resumptions,
        host=host,
    )
    result = simulation.run(traffic.conversations(seed))
    rows = [row for row in result.rows if not row.failed]
    if not rows:
        raise ConfigError(f"shape {shape}: every turn failed; are its workers ever alive?")
    later = [row for row in rows if row.turn > 1]
    arrived_s = max(row.at_s for row in result.rows) - min(row.at_s for row in result.rows)
    tokens = sum(row.output_tokens for row in rows)
    lost = sum(_lost(row) for row in later)
    tpots = [row.tpot_ms for row in rows if row.output_tokens > 1]
    return StudyRow(
        shape=shape,
        policy=policy,
        placement=routing.placement,
        think_s=traffic.think_s,
        workers=parsed.workers,
        turns=len(result.rows),
        failed_turns=len(result.rows) - len(rows),
        qps=round(len(result.rows) / max(1.0, arrived_s) / parsed.workers, 3),
        t1_ttft_p50_ms=_quantile([row.ttft_ms for row in rows if row.turn == 1], 0.5),
        t2_ttft_p50_ms=_quantile([row.ttft_ms for row in later], 0.5),
        t2_ttft_p99_ms=_quantile([row.ttft_ms for row in later], 0.99),
        tpot_p50_ms=_quantile(tpots, 0.5),
        tpot_p99_ms=_quantile(tpots, 0.99),
        ok_share=None if targets is None else sum(_met(targets, row) for row in rows) / len(rows),
        local_share=sum(row.route is not Route.REMOTE for row in later) / max(1, len(later)),
        lost_share=lost / max(1, len(later)),
        moved_tokens_per_turn=result.moved_tokens / len(rows),
        gpu_s_per_mtoken=parsed.workers * result.ended_s / tokens * 1e6,
        event_s=round(time.perf_counter() - started_s, 3),
        memory_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    )


def _lost(row: TurnRow) -> bool:
    return row.reason is Reason.REFUSED_BY_WORKER or row.cached_tokens == 0


def _met(targets: Targets, row: TurnRow) -> bool:
    ttft, tpot = targets.ttft_ms, targets.tpot_ms
    return (ttft is None or row.ttft_ms <= ttft) and (tpot is None or row.tpot_ms <= tpot)


def _quantile(values: list[float], share: float) -> float:
    values = sorted(values)
    return round(values[min(len(values) - 1, int(share * len(values)))], 2) if values else 0.0


def candidates(workers: int) -> Iterator[tuple[str, str]]:
    """Yield every cluster of a size, with its policy."""
    yield f"{workers}R", "replica"
    for prefill in range(1, workers):
        yield f"{prefill}P_{workers - prefill}D", "pd"
        yield f"{prefill}P_{workers - prefill}pD", "full"


def plan(
    costs: Costs,
    traffic: Traffic,
    targets: Targets,
    share: float,
    max_workers: int,
    seed: int,
) -> tuple[list[StudyRow], StudyRow | None]:
    """Find the smallest cluster that meets the targets.

    Returns:
        All clusters that were tried. And the one with the fewest workers with which ``share`` of
        all turns meet ``targets``, or None; of several the one with most room.
    """
    tried: list[StudyRow] = []
    for workers in range(1, max_workers + 1):
        rows = [
            study(costs, shape, policy, traffic, seed, targets)
            for shape, policy in candidates(workers)
        ]
        tried += rows
        enough = [row for row in rows if (row.ok_share or 0.0) >= share]
        if enough:
            return tried, min(enough, key=lambda row: _used(targets, row))
    return tried, None


def _used(targets: Targets, row: StudyRow) -> float:
    """The share of its targets that the slowest turns take, of both on the mean."""
    shares = ((row.t2_ttft_p99_ms, targets.ttft_ms), (row.tpot_p99_ms, targets.tpot_ms))
    return statistics.mean(took_ms / max_ms for took_ms, max_ms in shares if max_ms is not None)


@dataclass(frozen=True, slots=True)
class Weighing:
    """Weights with which the router routes this traffic as the plan did.

    Attributes:
        local_up_to: the ``tpot`` weight (``ttft`` 1) up to which Algorithm 1 sends it local; None:
            it does at any.
    """

    weights: Weights
    local_up_to: float | None


def weigh(costs: Costs, best: StudyRow, traffic: Traffic, seed: int) -> Weighing | None:
    """Choose weights for the router of a planned cluster.

    Returns:
        Weights far on the side of the plan's route, or even ones, if they are. None for replicas,
        which have nothing to decide, and for remote turns that are worse in all.
    """
    if "P" not in best.shape:
        return None
    limit = break_even(costs, best.shape.replace("pD", "D").replace("D", "pD"), traffic, seed)
    if "pD" in best.shape:
        w_tpot = 1.0 if limit is None else min(1.0, limit / 2)
    elif limit is None:
        return None
    else:
        w_tpot = max(1.0, limit * 2)
    return Weighing(Weights(1.0, w_tpot), limit)


def break_even(costs: Costs, shape: str, traffic: Traffic, seed: int) -> float | None:
    """Return the ``w_tpot`` (with ``w_ttft`` 1) up to which Algorithm 1 sends this traffic local.

    Args:
        shape: with decode workers that append; the same is simulated without.

    Returns:
        None: at any weight.
    """
    local = study(costs, shape, "full", traffic, seed)
    remote = study(costs, shape.replace("pD", "D"), "pd", traffic, seed)
    saved = 1 - local.t2_ttft_p50_ms / remote.t2_ttft_p50_ms
    lost = local.tpot_p50_ms / remote.tpot_p50_ms - 1
    return max(0.0, saved) / lost if lost > 0 else (None if saved > 0 else 0.0)
