"""``ppd-eval pool-control``: the pool's control loop when the load changes in steps.

The real scheduler and the real loop in simulated time: a step of four slots takes a quarter of a
millisecond. Decode hides a search behind tokens for a while, then it stalls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ppd.ann.control import Aims, ControlLoop, Feedback
from ppd.ann.schedule import Bounds, Controls, Scheduler, Stage, Ticket

from ..provenance import provenance
from ..raw_rows import appending

_STEP_S, _SLOTS, _LANES = 0.00025, 4, 64
_STEPS = {Stage.PREFILL: 3, Stage.DECODE: 6}  # of a search
_BUDGET_S = {Stage.PREFILL: 0.01, Stage.DECODE: 0.1}
_PHASE_S, _INTERVAL_S = 10.0, 0.25


@dataclass(frozen=True, slots=True)
class Phase:
    """Shares of the slots that each stage asks for, and of the KV link that is used."""

    name: str
    prefill: float
    decode: float
    link_use: float = 0.5


_PHASES = (
    Phase("quiet", 0.2, 0.4),
    Phase("prefill bursts", 0.6, 0.35),
    Phase("too much decode", 0.35, 0.68),
    Phase("quiet", 0.2, 0.4),
    Phase("prefill bursts, link full", 0.6, 0.35, link_use=0.97),
    Phase("prefill bursts", 0.6, 0.35),
)
_HIDDEN_S, _BETWEEN_S = 0.02, 0.16  # of decoding: what a search hides behind; from one to the next


@dataclass(frozen=True, slots=True)
class Interval:
    """What one interval looked like, and the controls that were chosen at its end."""

    at_s: float
    load: float
    link_use: float
    prefill_p95_ms: float
    decode_stall: float
    reserved: float
    flush_ms: float
    move: str


def simulate(seed: int, controlled: bool) -> Iterator[Interval]:
    """All phases, one after the other; without control the first controls stay."""
    source = random.Random(seed)
    loop = ControlLoop(Aims(), Controls(reserved=0.3, flush_s=0.01))
    plenty = Bounds(10**9, 10**9)
    scheduler = Scheduler(plenty, loop.controls, lambda: _STEP_S)
    running: list[Ticket] = []
    waits: dict[Stage, list[float]] = {stage: [] for stage in Stage}
    next_s = dict.fromkeys(Stage, 0.0)
    steps = round(_INTERVAL_S / _STEP_S)
    for number in range(1, round(len(_PHASES) * _PHASE_S / _STEP_S) + 1):
        now_s = number * _STEP_S
        phase = _PHASES[min(len(_PHASES) - 1, int(now_s / _PHASE_S))]
        loads = {Stage.PREFILL: phase.prefill, Stage.DECODE: phase.decode}
        for stage in Stage:
            rate = loads[stage] * _SLOTS / _STEP_S / _STEPS[stage]
            while next_s[stage] <= now_s:
                at_s = next_s[stage]
                scheduler.offer(Ticket(stage, at_s, at_s + _BUDGET_S[stage], _STEPS[stage]))
                next_s[stage] += source.expovariate(rate)
        for one in scheduler.choose(now_s, _SLOTS, _LANES - len(running), running):
            if one not in running:
                running.append(one)
            one.steps_left -= 1
        for one in [one for one in running if one.steps_left <= 0]:
            running.remove(one)
            waits[one.stage].append(now_s + _STEP_S - one.arrived_s)
        if number % steps == 0:
            p95_ms = float(np.percentile(waits[Stage.PREFILL] or [0.0], 95)) * 1e3
            stalls = [max(0.0, one - _HIDDEN_S) / _BETWEEN_S for one in waits[Stage.DECODE]]
            stall = min(1.0, float(np.mean(stalls or [0.0])))
            move = "fixed"
            if controlled:
                move = str(loop.step(Feedback(phase.link_use, p95_ms, stall)))
                scheduler.controls = loop.controls
            now = scheduler.controls
            load = sum(loads.values())
            flush_ms = now.flush_s * 1e3
            yield Interval(now_s, load, phase.link_use, p95_ms, stall, now.reserved, flush_ms, move)
            waits = {stage: [] for stage in Stage}


def run(seed: int, out: Path | None, plot: Path | None) -> int:
    histories = {way: list(simulate(seed, way == "controlled")) for way in ("controlled", "fixed")}
    with appending(out) as write:
        for way, history in histories.items():
            for interval in history:
                write(provenance(seed) | {"what": "control", "way": way} | asdict(interval))
    aims = Aims()
    told = {
        way: {
            "prefill_over": sum(one.prefill_p95_ms > aims.prefill_wait_p95_ms for one in history),
            "decode_over": sum(one.decode_stall > aims.decode_stall for one in history),
            "intervals": len(history),
        }
        for way, history in histories.items()
    }
    if plot is not None:
        _draw(histories, plot)
    print(json.dumps(told))
    return 0


def _draw(histories: dict[str, list[Interval]], plot: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    aims = Aims()
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 8), sharex=True, layout="constrained")
    shown = (
        ("prefill_p95_ms", "prefill wait p95, ms", aims.prefill_wait_p95_ms),
        ("decode_stall", "decode stall, share", aims.decode_stall),
        ("reserved", "reserved for prefill", None),
        ("flush_ms", "flush timeout, ms", None),
    )
    for axis, (name, label, aim) in zip(axes, shown, strict=True):
        for way, history in histories.items():
            values = [getattr(one, name) for one in history]
            axis.plot([one.at_s for one in history], values, label=way, linewidth=1.2)
        if aim is not None:
            axis.axhline(aim, color="grey", linestyle=":", linewidth=1, label="aim")
        if name == "flush_ms":
            axis.set_yscale("log")
        elif name != "reserved":
            axis.set_yscale("symlog", linthresh=0.01 if name == "decode_stall" else 1)
        if name == "decode_stall":
            axis.set_ylim(bottom=0.0)
        axis.set_ylabel(label, fontsize=8)
        for number in range(1, len(_PHASES)):
            axis.axvline(number * _PHASE_S, color="lightgrey", linewidth=0.8)
    axes[0].legend(fontsize=8, loc="lower right")
    for number, phase in enumerate(_PHASES):
        at_s = (number + 0.5) * _PHASE_S
        told = f"{phase.name}\n{phase.prefill:g} + {phase.decode:g} of the slots"
        axes[0].annotate(
            told, (at_s, 1.03), xycoords=("data", "axes fraction"), ha="center", fontsize=7
        )
    axes[-1].set_xlabel("seconds")
    figure.savefig(plot, dpi=110)
