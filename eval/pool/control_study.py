"""``ppd-eval pool control``: the control loop while the load changes, simulated or measured.

The real engines, scheduler and loop, over the costs of the simulated bursts or over an index. In
both a prefill search is followed by a transfer over a simulated KV link, which serves one transfer
after the other. Searches are long, since the loop is of use only where decode's can be late.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppd.ann.control import Aims, ControlLoop, Feedback
from ppd.ann.schedule import MAX_RESERVED, Controls, Scheduler, Stage
from ppd.ann.searches import Search

from ..provenance import provenance
from ..raw_rows import appending
from . import bursts, huge_pages
from .arrivals import KINDS, Arrival
from .given import Given, Sample, print_progress
from .orders import Way
from .queueing import Costs, Ours, serve_ours
from .waits import BeforeTurn, Ended, unchanged

WIDER = 4  # itopk, as a multiple of the bursts'
TOKEN_MS = 10.0  # time between two tokens of a stream
_INTERVAL_S = 0.25
_AIMS = Aims()
_LATE_MS = TOKEN_MS  # a decode search that costs its stream a token
_AT_ONCE, _TRIES = 1_000, 3  # searches that the capacity is measured with


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the history.

    Attributes:
        prefill: arrivals of the stage, as a share of the searches that the cores finish if there
            are no others.
        decode: the same.
        link: load of the KV link by the transfers of the prefills.
    """

    name: str
    prefill: float
    decode: float
    link: float = 0.5
    seconds: float = 10.0


PHASES = (
    Phase("quiet", 0.2, 0.4),
    Phase("busy", 0.5, 0.4),
    Phase("busy, full link", 0.5, 0.4, link=1.1),
    Phase("quiet again", 0.2, 0.4),
)


_PRINTED = ("prefill_p95_ms", "decode_p95_ms", "decode_late", "kv_there_p95_ms")
_LOOPS = ("loop", "loop, speed inferred")  # the second: the highest rate so far is the link's speed
_FIXED = {f"fixed at {share:g}": share for share in (MAX_RESERVED, 0.5, _AIMS.min_reserved)}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A prefill whose KV has arrived."""

    arrived_s: float
    at_s: float
    waited_s: float


Serve = Callable[[Sequence[Arrival], Controls, BeforeTurn], Sequence[Ended]]


def _capacities(serve: Serve, queries: int) -> dict[Stage, float]:
    """Return the searches of each stage that are finished a second if all are there at once."""
    finished: dict[Stage, float] = {}
    for stage in Stage:
        kinds = itertools.cycle(KINDS[stage])
        arrivals = [_arrival(0.0, stage, i % queries, next(kinds)) for i in range(_AT_ONCE)]
        tries = [
            max(one.at_s for one in serve(arrivals, Controls(), unchanged)) for _ in range(_TRIES)
        ]
        finished[stage] = _AT_ONCE / statistics.median(tries)
    return finished


def draw(
    capacities: Mapping[Stage, float], queries: int, seed: int, phases: Sequence[Phase] = PHASES
) -> list[Arrival]:
    """Draw the searches of all phases; each stage is a Poisson process.

    Args:
        capacities: searches of each stage that the cores finish a second.
        queries: number of different queries.
        seed: of the draw.
        phases: one after the other.
    """
    source = random.Random(seed)
    arrivals: list[Arrival] = []
    begins_s = 0.0
    for phase in phases:
        ends_s = begins_s + phase.seconds
        for stage, load in ((Stage.PREFILL, phase.prefill), (Stage.DECODE, phase.decode)):
            at_s = begins_s + source.expovariate(load * capacities[stage])
            while at_s < ends_s:
                query = source.randrange(queries)
                arrivals.append(_arrival(at_s, stage, query, source.choice(KINDS[stage])))
                at_s += source.expovariate(load * capacities[stage])
        begins_s = ends_s
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _arrival(at_s: float, stage: Stage, query: int, kind: tuple[int, int]) -> Arrival:
    itopk, limit = kind
    return Arrival(at_s, stage, query, WIDER * itopk, limit)


class _Link:
    """The KV link: one transfer after the other."""

    def __init__(self, arrivals: Sequence[Arrival], phases: Sequence[Phase]) -> None:
        self._phases = phases
        self._free_s = 0.0
        self._busy: list[tuple[float, float]] = []
        prefills = [one.at_s for one in arrivals if one.stage is Stage.PREFILL]
        self._transfer_s = []
        ends_s = 0.0
        for phase in phases:
            begins_s, ends_s = ends_s, ends_s + phase.seconds
            count = sum(begins_s <= at_s < ends_s for at_s in prefills)
            self._transfer_s.append(phase.link * phase.seconds / max(1, count))

    def send(self, ended: Ended) -> _Sent:
        number = phase_at(ended.arrived_s, self._phases)
        begins_s = max(ended.at_s, self._free_s)
        self._free_s = begins_s + self._transfer_s[number]
        self._busy.append((begins_s, self._free_s))
        return _Sent(ended.arrived_s, self._free_s, begins_s - ended.at_s)

    def use(self, from_s: float, to_s: float) -> float:
        """The share of a time in which the link is busy."""
        self._busy = [one for one in self._busy if one[1] > from_s]
        busy_s = sum(max(0.0, min(end, to_s) - max(begin, from_s)) for begin, end in self._busy)
        return min(1.0, busy_s / (to_s - from_s))


def phase_at(at_s: float, phases: Sequence[Phase] = PHASES) -> int:
    """Return the number of the phase at a time."""
    ends_s = list(itertools.accumulate(phase.seconds for phase in phases))
    return min(bisect_right(ends_s, at_s), len(phases) - 1)


def rows(
    way: str, arrivals: Sequence[Arrival], serve: Serve, phases: Sequence[Phase] = PHASES
) -> Iterator[dict[str, Any]]:
    """Serve all phases in one way, and yield a row for each phase."""
    loop = ControlLoop(_AIMS, Controls()) if way in _LOOPS else None
    highest = 0.0
    controls = loop.controls if loop else Controls(_FIXED[way])
    link = _Link(arrivals, phases)
    sent: list[_Sent] = []
    reserved: list[tuple[float, float]] = []
    seen, next_s = 0, _INTERVAL_S

    def before_turn(now_s: float, scheduler: Scheduler[Search], ended: Sequence[Ended]) -> None:
        nonlocal seen, next_s, highest
        if now_s < next_s:
            return
        new = ended[seen:]
        seen += len(new)
        sent.extend(link.send(one) for one in new if one.stage is Stage.PREFILL)
        if loop is not None:
            link_use = link.use(next_s - _INTERVAL_S, next_s)
            highest = max(highest, link_use)
            if way == "loop, speed inferred" and highest:
                link_use /= highest
            loop.step(Feedback(link_use, _p95_ms(new, Stage.DECODE), TOKEN_MS))
            scheduler.controls = loop.controls
        reserved.append((next_s, scheduler.controls.reserved))
        next_s += _INTERVAL_S * (1 + (now_s - next_s) // _INTERVAL_S)

    ended = serve(arrivals, controls, before_turn)
    sent.extend(link.send(one) for one in ended[seen:] if one.stage is Stage.PREFILL)
    for number, phase in enumerate(phases):
        row: dict[str, Any] = {"way": way, "phase": phase.name}
        for stage in Stage:
            waits_ms = [
                1e3 * (one.at_s - one.arrived_s)
                for one in ended
                if one.stage is stage and phase_at(one.arrived_s, phases) == number
            ]
            row[f"{stage}_p95_ms"] = float(np.percentile(waits_ms, 95))
            if stage is Stage.DECODE:
                row["decode_late"] = float(np.mean(np.array(waits_ms) > _LATE_MS))
        ttft_ms = [
            1e3 * (one.at_s - one.arrived_s)
            for one in sent
            if phase_at(one.arrived_s, phases) == number
        ]
        row["kv_there_p95_ms"] = float(np.percentile(ttft_ms, 95))
        shares = [share for at_s, share in reserved if phase_at(at_s - 1e-9, phases) == number]
        row["reserved"] = statistics.fmean(shares)
        yield row


def _p95_ms(ended: Sequence[Ended], stage: Stage) -> float:
    waits_ms = [1e3 * (one.at_s - one.arrived_s) for one in ended if one.stage is stage]
    return float(np.percentile(waits_ms, 95)) if waits_ms else 0.0


def simulate(seeds: int, out: Path | None, phases: Sequence[Phase] = PHASES) -> int:
    """Simulate all ways; the last line on stdout is one JSON object of medians."""
    costs = Costs()

    def serve(
        arrivals: Sequence[Arrival], controls: Controls, before_turn: BeforeTurn
    ) -> Sequence[Ended]:
        return serve_ours(arrivals, costs, Ours(controls), before_turn).ended

    about = {"measured": False, **asdict(costs)}
    return _run(serve, 1, seeds, about, out, phases)


def measure(
    sample: Sample,
    seeds: int,
    threads: int,
    out: Path | None,
    phases: Sequence[Phase] = PHASES,
) -> int:
    """Measure all ways over an index; the last line on stdout is one JSON object of medians."""
    huge_pages.ensure()
    rows, queries, _ = sample.embedded()
    target = Given(rows, threads).target
    moved = target.snapshot.space.queries(queries)

    def serve(
        arrivals: Sequence[Arrival], controls: Controls, before_turn: BeforeTurn
    ) -> Sequence[Ended]:
        served = bursts.run(Way.OURS, target, moved, arrivals, threads, controls, before_turn)
        return served.ended

    about = {"measured": True, "n": rows.shape[0]}
    return _run(serve, queries.shape[0], seeds, about, out, phases)


def _run(
    serve: Serve,
    queries: int,
    seeds: int,
    about: dict[str, object],
    out: Path | None,
    phases: Sequence[Phase],
) -> int:
    capacities = _capacities(serve, queries)
    print_progress(
        ", ".join(f"{count:.0f} {stage} searches/s" for stage, count in capacities.items())
        + " are finished if all are there at once"
    )
    about = {**about, "wider": WIDER, "token_ms": TOKEN_MS, "late_ms": _LATE_MS}
    about |= {f"{stage}_capacity": count for stage, count in capacities.items()}
    medians: dict[str, dict[str, list[float]]] = {}
    ways = [*_FIXED, *_LOOPS]
    with appending(out) as write:
        for seed in range(seeds):
            arrivals = draw(capacities, queries, seed, phases)
            turn = seed % len(ways)  # no way is always the first one
            for way in ways[turn:] + ways[:turn]:
                for row in rows(way, arrivals, serve, phases):
                    write({**row, **about, **provenance(seed)})
                    for field in _PRINTED:
                        name = f"{row['phase']}: {field}"
                        medians.setdefault(way, {}).setdefault(name, []).append(row[field])
    print(
        json.dumps(
            {
                way: {name: round(statistics.median(values), 3) for name, values in of.items()}
                for way, of in medians.items()
            }
        )
    )
    return 0
