"""A comparison on a simulated cluster: every way serves the same windows.

Rows are those of a real comparison. Besides, each weighting has a clairvoyant way, which shows what
better decisions could win (``clairvoyant``).
"""

from __future__ import annotations

import math
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ppd.decision import Policy
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Weights
from ppd.sessions import session_name
from ppd.table import Table
from ppd.table_policy import TablePolicy

from ..provenance import provenance
from ..raw_rows import append_whole, end_last_line
from ..simulation.machine import CHUNKING
from ..simulation.planned import simulated
from ..simulation.rows import Result, TurnRow
from ..simulation.simulator import Simulation
from ..simulation.traffic import Clients, Conversation
from ..simulation.workers import Shape
from .clairvoyant import Clairvoyant, CostOf
from .config import (
    AGAIN,
    BASE,
    CLAIRVOYANT,
    FULL_TRANSFER,
    PPD,
    REPLICA,
    Comparison,
    Simulated,
    Trace,
    seeds_of,
    ways,
)
from .drive import Study, measured
from .rollout import Turn
from .way import Way

_MOMENT_S = 0.05  # some decode steps

Times = Mapping[Turn, tuple[float, float]]  # TTFT and TPOT of later turns, in ms


@dataclass(frozen=True, slots=True)
class _Cluster:
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


def run(study: Study, simulation: Simulated, out: Path, processes: int) -> None:
    """Simulate the windows that ``out`` does not hold yet, and append them there.

    Raises:
        ConfigError: a trace, a profile or ``out`` cannot be read or written, or a conversation is
            too long for a worker.
    """
    windows = study.windows()
    done = measured(out)
    left = [
        (trace, seed, _ways_of(study.config, trace, seed), windows[trace.name, seed])
        for trace in study.config.traces
        for seed in study.config.seeds_of(trace)
    ]
    left = [
        (trace, seed, every, window)
        for trace, seed, every, window in left
        if any((trace.name, seed, way.name) not in done for way in every)
    ]
    print(f"{len(left)} of {len(windows)} windows to simulate", file=sys.stderr, flush=True)
    cluster = _Cluster(simulation, None if study.table is None else _read_table(study.table))
    work = partial(_window_rows, cluster, study.config.rivals)
    end_last_line(out)
    with multiprocessing.get_context("fork").Pool(min(processes, max(1, len(left)))) as pool:
        for number, rows in enumerate(pool.imap_unordered(work, left), 1):
            new = [row for row in rows if (row["trace"], row["seed"], row["way"]) not in done]
            append_whole(out, new)
            last = rows[-1]
            print(
                f"{number}/{len(left)} {last['trace']} seed {last['seed']}",
                file=sys.stderr,
                flush=True,
            )


def _read_table(path: Path) -> Table:
    try:
        return Table.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error


def _ways_of(config: Comparison, trace: Trace, seed: int) -> list[Way]:
    return [way for way in ways(config) if seed in seeds_of(config, trace, way)]


def _window_rows(
    cluster: _Cluster,
    rivals: Sequence[str],
    place: tuple[Trace, int, Sequence[Way], Sequence[Any]],
) -> list[dict[str, Any]]:
    """Simulate every way on one window, and return its rows."""
    trace, seed, every, planned = place
    window = simulated(planned, end_at_cuts=True)
    plain = [way for way in every if way.policy != CLAIRVOYANT]
    results = {way.name: cluster.run(way, cluster.policy(way), window, seed) for way in plain}
    times = {name: _times(result.rows) for name, result in results.items()}
    for way in every:
        if way.policy == CLAIRVOYANT:
            weights = way.objective
            assert isinstance(weights, Weights)
            means = {policy: _means(times[policy], times[BASE]) for policy in rivals}
            means.pop(FULL_TRANSFER, None)  # a cluster without caches on decode workers
            best, _ = min(
                ((policy, _cost(weights, of)) for policy, of in means.items()), key=itemgetter(1)
            )
            cost = _cost_of(weights, times[BASE], means[best])
            results[way.name] = _foreseen(cluster, way, best, cost, window, seed)
    rows: list[dict[str, Any]] = []
    for way in every:
        rows += _rows(trace, seed, way, window, results[way.name], cluster)
    return rows


def _foreseen(
    cluster: _Cluster,
    way: Way,
    base: str,
    cost: CostOf,
    window: Sequence[Conversation],
    seed: int,
) -> Result:
    """Simulate a window with the clairvoyant, whose base policy is the best static one."""

    def now_ms() -> float:
        return simulation.clock.now_ms

    policy = cluster.policy(Way(base))
    with Clairvoyant(policy, cost, now_ms, 1e3 * cluster.simulated.horizon_s) as foresight:
        simulation = cluster.simulation(way, foresight, seed)
        return simulation.run(window)


def _moved(window: Sequence[Conversation], seed: int) -> list[Conversation]:
    """The same conversations, each a moment later: what the same policy takes by chance."""
    source = random.Random(f"again/{seed}")
    return [replace(one, at_s=one.at_s + source.uniform(0.0, _MOMENT_S)) for one in window]


def _times(rows: Sequence[TurnRow]) -> Times:
    return {
        (session_name(row.session), row.turn): (row.ttft_ms, row.tpot_ms)
        for row in rows
        if row.turn > 1 and not row.failed
    }


def _means(times: Times, base: Times) -> tuple[float, float]:
    """Return the geometric means of TTFT and TPOT, each over those of the same turn."""
    logs = [_logs(times[turn], base[turn]) for turn in times if turn in base]
    if not logs:
        return 1.0, 1.0
    return math.exp(fmean(one[0] for one in logs)), math.exp(fmean(one[1] for one in logs))


def _logs(times: tuple[float, float], base: tuple[float, float]) -> tuple[float, float]:
    (ttft_ms, tpot_ms), (base_ttft_ms, base_tpot_ms) = times, base
    has_tpot = tpot_ms > 0 and base_tpot_ms > 0  # a reply of one token has none
    return math.log(ttft_ms / base_ttft_ms), math.log(tpot_ms / base_tpot_ms) if has_tpot else 0.0


def _cost(weights: Weights, means: tuple[float, float]) -> float:
    return weights.ttft * means[0] + weights.tpot * means[1]


def _cost_of(weights: Weights, base: Times, means: tuple[float, float]) -> CostOf:
    """Return what a turn adds to the cost of geometric means, if it does not change them much.

    Args:
        base: the times that others are divided by.
        means: about which it is linear.
    """

    def cost(turn: Turn, ttft_ms: float, tpot_ms: float) -> float:
        if turn not in base:
            return 0.0
        ttft, tpot = _logs((ttft_ms, tpot_ms), base[turn])
        return weights.ttft * means[0] * ttft + weights.tpot * means[1] * tpot

    return cost


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
    cluster: _Cluster,
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
        **cluster.simulated.machine.provenance(),
        **provenance(seed),
    }
    return [*turns, run_row]
