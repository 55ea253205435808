"""One window of a simulated comparison: every way serves it, in a process of its own.

The clairvoyant forks that process many times, and a fork takes longer the more memory it has. So
this imports neither numpy nor what measures real clusters.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ppd.decision import Policy
from ppd.policies import static_policy
from ppd.score import Weights
from ppd.table import Table
from ppd.table_policy import TablePolicy

from ..provenance import provenance
from ..simulation.machine import CHUNKING
from ..simulation.planned import simulated
from ..simulation.rows import Result
from ..simulation.simulator import Simulation
from ..simulation.traffic import Clients, Conversation
from ..simulation.workers import Shape
from ..traffic.conversations import Conversation as Planned
from .clairvoyant import Clairvoyant, CostOf
from .config import AGAIN, BASE, CLAIRVOYANT, FULL_TRANSFER, PPD, REPLICA, Simulated, Trace
from .turn_costs import cost_of, mean_ratios, times_of, weighted
from .way import Way

_MOMENT_S = 0.05  # some decode steps


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a worker process needs to simulate a window."""

    simulated: Simulated
    table: Table | None

    def run(self, way: Way, policy: Policy, window: Sequence[Conversation], seed: int) -> Result:
        """Simulate a window with a policy."""
        if way.policy == AGAIN:
            window = _moved(window, seed)
        return self.simulation(way, policy, seed).run(window)

    def simulation(self, way: Way, policy: Policy, seed: int) -> Simulation:
        """Return the simulation of a way, before its first event."""
        shape = Shape.parse(self.simulated.shape)
        if way.policy == REPLICA:
            shape = Shape(replica=shape.workers)
        return Simulation(
            self.simulated.machine.costs(),
            shape,
            policy,
            Clients(),
            seed,
            objective=way.objective,
            delta=way.policy != FULL_TRANSFER,
            chunking=CHUNKING,
            kv_events=self.simulated.kv_events,
        )

    def policy(self, way: Way) -> Policy:
        """Return a new policy of a way that needs no foresight."""
        if way.policy == PPD:
            return TablePolicy(self.table)
        return static_policy(BASE if way.policy in (FULL_TRANSFER, AGAIN) else way.policy)


@dataclass(frozen=True, slots=True)
class Window:
    """Conversations of a trace, and the ways that serve them.

    Attributes:
        rivals: the policies that ``ppd`` is compared with.
    """

    trace: Trace
    seed: int
    ways: Sequence[Way]
    rivals: Sequence[str]
    planned: Sequence[Planned]


def rows_of(cluster: Cluster, place: Window) -> list[dict[str, Any]]:
    """Simulate every way on one window, and return its rows."""
    window = simulated(place.planned, end_at_cuts=True)
    plain = [way for way in place.ways if way.policy != CLAIRVOYANT]
    results = {way.name: cluster.run(way, cluster.policy(way), window, place.seed) for way in plain}
    times = {name: times_of(result.rows) for name, result in results.items()}
    for way in place.ways:
        if way.policy == CLAIRVOYANT:
            weights = way.objective
            assert isinstance(weights, Weights)
            bases = [Way(policy) for policy in place.rivals if policy != FULL_TRANSFER]
            bases.append(Way(PPD, weights))
            means = {one: mean_ratios(times[one.name], times[BASE]) for one in bases}
            best = min(bases, key=lambda one: weighted(weights, means[one]))
            cost = cost_of(weights, times[BASE], means[best])
            results[way.name] = _foreseen(cluster, way, best, cost, window, place.seed)
    rows: list[dict[str, Any]] = []
    for way in place.ways:
        rows += _rows(place.trace, place.seed, way, window, results[way.name], cluster)
    return rows


def _foreseen(
    cluster: Cluster,
    way: Way,
    base: Way,
    cost: CostOf,
    window: Sequence[Conversation],
    seed: int,
) -> Result:
    """Simulate a window with the clairvoyant, whose base is the best policy there."""

    def now_ms() -> float:
        return simulation.clock.now_ms

    policy = cluster.policy(base)
    with Clairvoyant(policy, cost, now_ms, 1e3 * cluster.simulated.horizon_s) as foresight:
        simulation = cluster.simulation(way, foresight, seed)
        return simulation.run(window)


def _moved(window: Sequence[Conversation], seed: int) -> list[Conversation]:
    """The same conversations, each a moment later: what the same policy takes by chance."""
    source = random.Random(f"again/{seed}")
    return [replace(one, at_s=one.at_s + source.uniform(0.0, _MOMENT_S)) for one in window]


def _decode_batch(result: Result) -> float:
    """Return how many requests decode at once, from the first arrival to the last token."""
    decodes_ms = sum(row.e2e_ms - row.ttft_ms for row in result.rows if not row.failed)
    return decodes_ms / (1e3 * result.ended_s)


def _rows(
    trace: Trace,
    seed: int,
    way: Way,
    window: Sequence[Conversation],
    result: Result,
    cluster: Cluster,
) -> list[dict[str, Any]]:
    """The rows of one run, as a comparison of real clusters writes them."""
    where = {"part": "compare", "trace": trace.name, "way": way.name, "seed": seed}
    turns = [
        {
            "row": "turn",
            **where,
            "conversation": row.session,
            "turn": row.turn,
            "route": row.route,
            "reason": row.reason,
            "cached_tokens": row.cached_tokens,
            "ttft_ms": round(row.ttft_ms, 3),
            "tpot_ms": round(row.tpot_ms, 4),
            "error": "failed" if row.failed else "",
        }
        for row in result.rows
    ]
    later = [row for row in result.rows if row.turn > 1]
    profile = cluster.simulated.machine.load()
    run_row = {
        "row": "run",
        **where,
        "planned": sum(len(one.turns) for one in window),
        "conversations": len(window),
        "failed": sum(row.failed for row in result.rows),
        "routes": Counter(str(row.route) for row in later),
        "cached_tokens": sum(row.cached_tokens for row in later),
        "kv_bytes_moved": result.moved_tokens * profile.kv_bytes_per_token,
        "evicted_tokens": result.evicted_tokens,
        "simulated_s": round(result.ended_s, 1),
        "decode_batch": round(_decode_batch(result), 1),
        "asked": msgspec.to_builtins(trace),
        "shape": cluster.simulated.shape,
        "kv_events": cluster.simulated.kv_events,
        "table": None if cluster.table is None else cluster.table.record.digest,
        **cluster.simulated.machine.provenance(),
        **provenance(seed),
    }
    return [*turns, run_row]
