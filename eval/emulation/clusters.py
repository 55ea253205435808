"""``ppd-eval emulate cluster``: conversations on an emulated cluster, through the ordinary router.

Arrivals and pauses are stretched by the slow motion, and what was measured is divided by it. So all
numbers of a row are those of the emulated cluster. A run's rows are written together at its end, so
that an interrupted command continues with the run that it lacks.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import aiohttp

from ppd.choice import PlacementRule
from ppd.contract import Role
from ppd.errors import ConfigError

from ..client import hold
from ..cluster import ClusterError, Process, wait_all
from ..endpoints import empty_caches
from ..samples import Sample
from ..summary import Slo
from ..traffic.conversations import Conversation
from ..traffic.workloads import Demand, plan
from .knobs import Knobs
from .model import LETTERS
from .traces import DeviceUse, RefusedRunError, device_use
from .workers import Emulated

T = TypeVar("T")  # what a run measures

SHAPES = ("1P1D", "2P2D", "1P3D", "4R", "1P1Dx2")
_SHAPE = re.compile(r"[1-9]P[1-9]D(?:x([2-9]))?|[1-9]R")
_KINDS = {"P": Role.PREFILL, "D": Role.DECODE, "R": Role.REPLICA}
_TOKEN_CPU_S = 0.0003  # of all processes together, for each token that reaches a client
_STEPS_PER_S = 140.0  # of a worker that is never idle
_STEP_CPU_S = 0.003
_CPU_SHARE = 0.1  # of the machine, so that a step is never waited for
_LEAST_SLOW_MOTION = 10.0
_SILENCE_S = 1800.0
_ROUTER = f"{__package__}.router"
_TRIES = 3  # of a run, before the machine counts as too slow


@dataclass(frozen=True, slots=True)
class Run:
    """One run on a cluster.

    Attributes:
        policy: of the router.
        qps: conversations a second of the emulated cluster.
        placement: the router's rule for new conversations.
        drafts: of speculative decoding, as ``Drafts.parse`` takes them; empty: none.
    """

    workload: str
    policy: str
    qps: float
    seed: int
    conversations: int
    slow_motion: float
    link_gbps: float
    placement: str = PlacementRule.HASH  # what rows without it were measured with
    drafts: str = ""

    def key(self) -> tuple[object, ...]:
        """What tells it from other runs in a file."""
        return tuple(asdict(self).values())

    def plan(self) -> list[Conversation]:
        """Return its conversations, at the emulated cluster's own times."""
        return plan(
            Demand(self.workload, conversations=self.conversations, qps=self.qps, seed=self.seed)
        )


def roles_of(shape: str) -> list[tuple[str, Role]]:
    """Return names and roles of the workers of a shape, such as ``2P2D``, ``4R`` or ``1P1Dx2``.

    Raises:
        ConfigError: it is none, or a cluster that can serve no request.
    """
    if _SHAPE.fullmatch(shape) is None:
        raise ConfigError(f"no such shape: {shape!r}; it is as {', '.join(SHAPES)}")
    return [
        (f"{kind.lower()}{i}", _KINDS[kind])
        for count, kind in re.findall(r"(\d+)([PDR])", shape)
        for i in range(int(count))
    ]


def ranks_of(shape: str) -> int:
    """Return how many ranks of DP attention each decode worker of a shape has.

    Raises:
        ConfigError: there is no such shape.
    """
    roles_of(shape)
    found = _SHAPE.fullmatch(shape)
    assert found is not None
    return int(found[1] or 1)


def slow_motion_for(workers: int, conversations: Sequence[Conversation]) -> float:
    """Return the slow motion at which this machine's cores are mostly idle.

    Args:
        conversations: of the heaviest run, at the emulated cluster's own times.
    """
    tokens = sum(turn.output_tokens for one in conversations for turn in one.turns)
    span_s = max(1.0, max(one.starts_at_s for one in conversations))
    cpu_share = tokens / span_s * _TOKEN_CPU_S + workers * _STEPS_PER_S * _STEP_CPU_S
    cores = len(os.sched_getaffinity(0))
    return max(_LEAST_SLOW_MOTION, float(math.ceil(cpu_share / cores / _CPU_SHARE)))


def stretched(conversations: Sequence[Conversation], by: float) -> list[Conversation]:
    """Return conversations whose arrivals and pauses take longer."""
    return [
        replace(
            one,
            starts_at_s=one.starts_at_s * by,
            turns=tuple(
                replace(turn, think_s=turn.think_s * by, gap_s=turn.gap_s * by)
                for turn in one.turns
            ),
        )
        for one in conversations
    ]


def compressed(sample: Sample, by: float) -> Sample:
    """Return a sample in the emulated cluster's time; histograms of gaps are left out."""
    return replace(
        sample,
        sent_at_s=round(sample.sent_at_s / by, 5),
        late_ms=round(sample.late_ms / by, 3),
        ttft_ms=round(sample.ttft_ms / by, 3),
        tpot_ms=round(sample.tpot_ms / by, 4),
        e2e_ms=round(sample.e2e_ms / by, 3),
        gaps=(),
    )


def start_cluster(
    cluster: Emulated,
    shape: str,
    router_flags: Sequence[str],
    worker: Sequence[str],
    slow_motion: float = 1.0,
    settings: str = "",
) -> Process:
    """Start the workers of a shape and a router, and wait for them.

    Args:
        slow_motion: of the router's clock.
        settings: lines of the router's configuration.
        worker: variables of the decode workers' plugin, ``NAME=VALUE``.

    Returns:
        The router.
    """
    for name, role in roles_of(shape):
        if name not in cluster.workers:
            if role is Role.DECODE:
                cluster.start(name, role, *worker, ranks=ranks_of(shape))
            else:
                cluster.start(name, role)
    wait_all(list(cluster.workers.values()), 600.0)
    router = cluster.launch.router(
        cluster.of("p"),
        cluster.of("d"),
        *router_flags,
        replica=cluster.of("r"),
        command=[sys.executable, "-m", _ROUTER, f"{slow_motion}", settings],
    )
    wait_all([router])
    return router


def run_once(cluster: Emulated, router: Process, run: Run, slo: Slo) -> Iterator[dict[str, Any]]:
    """Hold a run's conversations; yield a row for each turn, then one for the run.

    Raises:
        RefusedRunError: the machine was too slow for the slow motion.
        PpdError: a worker failed.
    """
    planned = run.plan()
    cluster.knobs.set(Knobs(run.slow_motion, run.link_gbps))
    from_s = time.monotonic()
    own = asyncio.run(held(cluster, router, [planned], run.slow_motion, f"{run.key()}"))
    use = device_use(cluster.traces, from_s, time.monotonic())
    print(
        f"  {run.policy} {run.placement} {run.qps:g}/s seed {run.seed}: "
        f"idle with work {use.bubble_share:.2%}, "
        f"longest stall {use.longest_stall_ms:.2f} ms",
        file=sys.stderr,
        flush=True,
    )
    use.require_valid()
    for sample in own:
        row = asdict(sample)
        del row["gaps"]
        yield {"row": "turn", **asdict(run), **row}
    yield {"row": "run", **asdict(run), **_summary(planned, own, slo, use)}


async def held(
    cluster: Emulated,
    router: Process,
    parts: Sequence[Sequence[Conversation]],
    slow_motion: float,
    seed: str,
    headers: dict[str, str] | None = None,
) -> list[Sample]:
    """Hold conversations with empty caches, and return their turns in the cluster's own time.

    Args:
        parts: one after the other, at the emulated cluster's own times.
        seed: of the texts.
        headers: of all requests.
    """
    async with aiohttp.ClientSession() as http:
        await empty_caches(http, [worker.url for worker in cluster.workers.values()])
    samples: list[Sample] = []
    for number, part in enumerate(parts):
        samples += await hold(
            router.url,
            stretched(part, slow_motion),
            seed=f"{seed}/{number}",
            vocabulary=LETTERS,
            silence_s=_SILENCE_S,
            headers=headers,
        )
    return [compressed(sample, slow_motion) for sample in samples]


def checked_use(cluster: Emulated, begun_s: float, ended_s: float) -> DeviceUse:
    """Return what the devices did between two seconds of ``time.monotonic``.

    Raises:
        ClusterError: a worker has ended.
        RefusedRunError: the machine was too slow for the slow motion.
    """
    for worker in cluster.workers.values():
        if worker.popen.poll() is not None:
            raise ClusterError(f"{worker.name} {worker.ending()}")
    use = device_use(cluster.traces, begun_s, ended_s)
    use.require_valid()
    return use


def tried(measure: Callable[[int], T]) -> T:
    """Return what a run measures; if the machine was too slow, it runs again.

    Args:
        measure: gets the number of earlier tries.

    Raises:
        RefusedRunError: the machine was too slow each time.
    """
    for tries in range(_TRIES - 1):
        try:
            return measure(tries)
        except RefusedRunError as refused:
            print(f"measured again: {refused}", file=sys.stderr, flush=True)
    return measure(_TRIES - 1)


def _summary(
    planned: Sequence[Conversation], samples: Sequence[Sample], slo: Slo, use: DeviceUse
) -> dict[str, Any]:
    later = [sample for sample in samples if sample.turn > 1 and not sample.error]
    first = [sample for sample in samples if sample.turn == 1 and not sample.error]
    met = sum(slo.met_by(sample) for sample in samples)
    return {
        "turns": len(samples),
        "planned_turns": sum(len(one.turns) for one in planned),
        "failed": sum(bool(sample.error) for sample in samples),
        "local": sum(sample.route == "local" for sample in later),
        "t1_cached_share": share([s.cached_tokens for s in first], [s.new_tokens for s in first]),
        "t1_ttft_p50_ms": median([sample.ttft_ms for sample in first]),
        "t1_ttft_p99_ms": quantile([sample.ttft_ms for sample in first], 0.99),
        "t2_ttft_p50_ms": median([sample.ttft_ms for sample in later]),
        "tpot_p50_ms": median([s.tpot_ms for s in (*first, *later) if s.output_tokens > 1]),
        "slo_ttft_ms": slo.ttft_ms,
        "slo_tpot_ms": slo.tpot_ms,
        "slo_met": round(met / max(1, len(samples)), 4) if slo.given else None,
        "steps": use.steps,
        "device_busy_ms": round(sum(use.busy_ms.values()), 1),
        "busy_ms_of": {worker: round(ms, 1) for worker, ms in use.busy_ms.items()},
        **use.fields(),
    }


def median(values: Sequence[float]) -> float | None:
    """Return the median, a value that was measured; None of no values."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], at: float) -> float | None:
    """Return a quantile, a value that was measured; None of no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(at * len(ordered)) - 1)] if ordered else None


def share(parts: Sequence[int], wholes: Sequence[int]) -> float | None:
    """Return the share of all parts in all wholes; None of no values."""
    return round(sum(parts) / sum(wholes), 4) if wholes else None
