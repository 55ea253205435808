"""What is compared: traces, windows of them, and the ways that serve them. Pure values."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter

import msgspec

from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Objective, Targets, Weights

from ..emulation.knobs import Knobs
from ..simulation.machine import Machine
from ..simulation.workers import Shape
from ..traffic.conversations import (
    Conversation,
    at_rate,
    delayed,
    poisson_starts,
    starting,
    within,
)
from ..traffic.workloads import Demand, plan
from .way import Way, label

PPD = "ppd"
CLAIRVOYANT = "clairvoyant"  # in a simulation: with all arrivals and lengths to come
AGAIN = "pd again"  # in a simulation: the measure once more, with arrivals a little apart
BASE = "pd"  # what others are divided by: every turn remote, only what is missing is sent
FULL_TRANSFER = "pd-full"  # the same to a decode worker without a radix cache: all is sent
REPLICA = "replica"  # two workers that do both: another cluster, so no rival of ``ppd``


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traffic of one kind.

    Attributes:
        workload: as of ``ppd-eval load``; ``{NAME}`` is a file given with ``--data NAME=FILE``.
        conversations: in a window; each seed takes the next window.
        also: further workloads. Each conversation is of one of them, all as likely; with
            ``poisson`` only.
        every: a window is every so many conversations, at their own times: seed 0 begins with the
            first one, seed 1 with the second. ``conversations`` is its largest number.
        qps: conversations a second; None: as the trace has them.
        poisson: arrivals are drawn, not the trace's.
        seeds: its own, in place of the comparison's.
        seconds: of a window: see ``within``.
        spread_s: each conversation starts up to so many seconds later than the trace has it, by
            chance. Times that were rounded would be bursts.
    """

    name: str
    workload: str
    conversations: int
    scale: float = 1.0
    qps: float | None = None
    poisson: bool = False
    seeds: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    every: int | None = None
    seconds: float | None = None
    spread_s: float = 0.0


class Simulated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster of a comparison that is simulated.

    Attributes:
        shape: in the simulator's notation, as ``1P_1pD``; its decode workers take local turns.
        clairvoyant: the weights of its clairvoyant ways, each of them one of the comparison's.
        foreseen: so many windows of each trace, its first ones, have clairvoyant ways.
        horizon_s: they count turns that are decided so long after a decision.
        kv_events: workers publish their evictions to the router.
    """

    machine: Machine
    shape: str = "1P_1pD"
    clairvoyant: tuple[Weights, ...] = (Weights(),)
    foreseen: int = 2
    horizon_s: float = 3.0
    kv_events: bool = True


class Emulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster of a comparison that is emulated.

    Attributes:
        shape: prefill and decode workers, as ``1P1D``.
    """

    machine: Machine
    shape: str = "1P1D"
    slow_motion: float = 10.0


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a comparison (see ``cpu.toml``).

    Attributes:
        policies: static ones, as of ``ppd-router``; ``pd`` is the measure, ``pd-full`` is ``pd``
            without a cache on the decode worker.
        weightings: for each, ``ppd`` is run with these weights.
        targets: for each, ``ppd`` is run with these targets, and compared by the share of later
            turns that miss one of them.
        tuning: so many seeds, from 0 on, are of windows that ``ppd`` was made with. Where arrivals
            are drawn, these windows and the others have no conversation in common.
        simulated: the cluster, if it is none of real workers.
        emulated: the cluster, if it is none of real devices.
    """

    seeds: tuple[int, ...]
    traces: tuple[Trace, ...]
    weightings: tuple[Weights, ...]
    targets: tuple[Targets, ...] = ()
    tuning: int = 0
    policies: tuple[str, ...] = (FULL_TRANSFER, BASE, "full", "partial:0.5", "threshold")
    worker_flags: tuple[str, ...] = ()
    simulated: Simulated | None = None
    emulated: Emulation | None = None

    @property
    def rivals(self) -> tuple[str, ...]:
        """The policies that run on the same cluster as ``ppd``."""
        return tuple(policy for policy in self.policies if policy != REPLICA)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All weights and targets."""
        weights: tuple[Objective, ...] = self.weightings
        return weights + self.targets

    def seeds_of(self, trace: Trace) -> tuple[int, ...]:
        """Return the seeds of a trace: its own, or those of all."""
        return trace.seeds or self.seeds


def ways(config: Comparison) -> list[Way]:
    """Return all ways of a comparison."""
    found = [Way(policy) for policy in config.policies]
    found += [Way(PPD, objective) for objective in config.objectives]
    if config.simulated is not None:
        found.append(Way(AGAIN))
        if config.simulated.foreseen:
            found += [Way(CLAIRVOYANT, weights) for weights in config.simulated.clairvoyant]
    return found


def seeds_of(config: Comparison, trace: Trace, way: Way) -> tuple[int, ...]:
    """Return the windows that a way serves: a clairvoyant one does not serve all."""
    seeds = config.seeds_of(trace)
    if config.simulated is not None and way.policy == CLAIRVOYANT:
        return seeds[: config.simulated.foreseen]
    return seeds


def load_config(path: Path) -> Comparison:
    """Read the configuration of a comparison.

    Raises:
        ConfigError: the file is missing, or nothing that can be compared.
    """
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=Comparison)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if problems := list(_problems(config)):
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return config


def _problems(config: Comparison) -> Iterator[str]:
    if not config.seeds or not config.traces or not config.weightings:
        yield "seeds, traces and weightings must name one each"
    if len({trace.name for trace in config.traces}) < len(config.traces):
        yield "two traces have the same name"
    if any(seed < 0 for trace in config.traces for seed in config.seeds_of(trace)):
        yield "seeds must be 0 or more: they count windows"
    if config.tuning < 0:
        yield f"tuning must be 0 or more seeds, got {config.tuning}"
    if BASE not in config.policies:
        yield f"policies must have {BASE}, which others are compared with"
    for policy in config.policies:
        if policy != FULL_TRANSFER:
            try:
                static_policy(policy)
            except ConfigError as error:
                yield str(error)
    for trace in config.traces:
        if trace.conversations < 1:
            yield f"trace {trace.name}: conversations must be at least 1"
        if trace.poisson and trace.qps is None:
            yield f"trace {trace.name}: poisson needs qps"
        if trace.also and not trace.poisson:
            yield f"trace {trace.name}: also needs poisson"
        if trace.every is not None and (trace.every < 1 or trace.poisson):
            yield f"trace {trace.name}: every must be at least 1, and without poisson"
        if not 0 <= trace.spread_s < float("inf") or (trace.spread_s and trace.poisson):
            yield f"trace {trace.name}: spread_s must be 0 or more, and without poisson"
        if trace.seconds is not None and not trace.seconds > 0:
            yield f"trace {trace.name}: seconds must be above 0, got {trace.seconds:g}"
    if config.simulated is not None:
        yield from _simulated_problems(config.simulated)
        if not set(config.simulated.clairvoyant) <= set(config.weightings):
            yield "simulated.clairvoyant must name weights that are in weightings"
    if config.emulated is not None:
        yield from _emulated_problems(config, config.emulated)
    yield from (problem for one in config.objectives if (problem := one.problem()))
    names = [label(objective) for objective in config.objectives]
    if len(set(names)) < len(names):
        yield f"two weightings or targets are alike in six digits: {', '.join(names)}"
    if any(weighting.throughput for weighting in config.weightings):
        yield "weightings: the costs that are compared are TTFT and TPOT, not throughput"


def _simulated_problems(simulated: Simulated) -> Iterator[str]:
    try:
        shape = Shape.parse(simulated.shape)
    except ConfigError as error:
        yield f"simulated: {error}"
    else:
        if shape.decode or shape.replica or not shape.appending:
            yield f"simulated.shape must have P and pD alone, got {simulated.shape}"
    if problem := simulated.machine.problem():
        yield f"simulated.machine: {problem}"
    if simulated.foreseen < 0:
        yield f"simulated.foreseen must be 0 or more windows, got {simulated.foreseen}"
    if not simulated.horizon_s > 0:
        yield f"simulated.horizon_s must be above 0, got {simulated.horizon_s:g}"


def _emulated_problems(config: Comparison, emulation: Emulation) -> Iterator[str]:
    if config.simulated is not None:
        yield "a comparison is simulated or emulated, not both"
    if config.worker_flags:
        yield "worker_flags are of real devices"
    if others := {FULL_TRANSFER, REPLICA} & set(config.policies):
        yield f"an emulated cluster serves no {' and no '.join(sorted(others))}: other workers"
    if re.fullmatch(r"[1-9]P[1-9]D", emulation.shape) is None:
        yield f"emulated.shape must be as 1P1D, got {emulation.shape!r}"
    if problem := emulation.machine.problem():
        yield f"emulated.machine: {problem}"
    if emulation.machine.slower != 1.0:
        yield "emulated.machine: a slower machine is a calibration of its profile"
    try:
        Knobs(emulation.slow_motion, emulation.machine.link_gbps)
    except ConfigError as error:
        yield f"emulated: {error}"


def window(
    trace: Trace, files: Mapping[str, Path], tokenizer: Path | None, seed: int, tuning: int = 0
) -> list[Conversation]:
    """The conversations of one seed: the seed's window of the trace, from its own beginning.

    Args:
        tuning: seeds below it draw from every second conversation, others from those between.

    Raises:
        ConfigError: a file is missing or broken, or the trace has no such window.
    """
    found = _window(trace, files, tokenizer, seed, tuning)
    if trace.spread_s:
        source = random.Random(f"{trace.name}/{seed}/spread")
        found = delayed(found, trace.spread_s, source)
    return found if trace.seconds is None else within(found, trace.seconds)


def _window(
    trace: Trace, files: Mapping[str, Path], tokenizer: Path | None, seed: int, tuning: int
) -> list[Conversation]:
    wholes = [_whole(trace, spec, files, tokenizer) for spec in (trace.workload, *trace.also)]
    whole = wholes[0]
    first = seed * trace.conversations
    if trace.poisson:  # they have no order: each seed draws its own
        source = random.Random(f"{trace.name}/{seed}")
        if tuning:
            wholes = [whole[seed < tuning :: 2] for whole in wholes]
        chosen = [_drawn(wholes, source) for _ in range(trace.conversations)]
        assert trace.qps is not None
        return starting(chosen, poisson_starts(len(chosen), trace.qps, source))
    if trace.every is not None:
        if seed >= trace.every:
            raise ConfigError(f"trace {trace.name}: has {trace.every} windows, seeds begin with 0")
        return whole[seed :: trace.every][: trace.conversations]
    if len(whole) < first + trace.conversations:
        raise ConfigError(
            f"trace {trace.name}: has {len(whole)} conversations, seed {seed} wants those from "
            f"{first} to {first + trace.conversations}"
        )
    chosen = whole[first : first + trace.conversations]
    starts_s = [conversation.starts_at_s - chosen[0].starts_at_s for conversation in chosen]
    return starting(chosen, starts_s if trace.qps is None else at_rate(starts_s, trace.qps))


def _whole(
    trace: Trace, spec: str, files: Mapping[str, Path], tokenizer: Path | None
) -> list[Conversation]:
    """All conversations of a workload, with sizes and times as they are.

    A window is cut out first, and then brought to its rate.
    """
    names = [name for _, name, _, _ in Formatter().parse(spec) if name is not None]
    if missing := [name for name in names if name not in files]:
        raise ConfigError(f"trace {trace.name}: give --data {missing[0]}=FILE")
    arrivals = "poisson" if trace.poisson else None
    demand = Demand(spec.format_map(files), arrivals, scale=trace.scale, tokenizer=tokenizer)
    return plan(replace(demand, qps=trace.qps) if trace.poisson else demand)


def _drawn(wholes: Sequence[Sequence[Conversation]], source: random.Random) -> Conversation:
    """Draw a conversation of one of the workloads; of a single one as without others."""
    return source.choice(wholes[0] if len(wholes) == 1 else source.choice(wholes))
