"""What is compared: traces, windows of them, and the ways that serve them. Pure values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

import msgspec

from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Weights

from ..traffic.conversations import Conversation, at_rate, poisson_starts, starting
from ..traffic.workloads import Demand, plan

PPD = "ppd"
BASE = "pd"  # what others are divided by: every turn remote, only what is missing is sent
FULL_TRANSFER = "pd-full"  # the same to a decode worker without a radix cache: all is sent
REPLICA = "replica"  # two workers that do both: another cluster, so no rival of ``ppd``


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traffic of one kind.

    Attributes:
        workload: as of ``ppd-eval load``; ``{NAME}`` is a file given with ``--data NAME=FILE``.
        conversations: in a window; each seed takes the next window.
        qps: conversations a second; None: as the trace has them.
        poisson: arrivals are drawn, not the trace's.
        seeds: its own, in place of the comparison's.
    """

    name: str
    workload: str
    conversations: int
    scale: float = 1.0
    qps: float | None = None
    poisson: bool = False
    seeds: tuple[int, ...] = ()


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a comparison (see ``cpu.toml``).

    Attributes:
        policies: static ones, as of ``ppd-router``; ``pd`` is the measure, ``pd-full`` is ``pd``
            without a cache on the decode worker.
        weightings: for each, ``ppd`` is run with these weights.
    """

    seeds: tuple[int, ...]
    traces: tuple[Trace, ...]
    weightings: tuple[Weights, ...]
    policies: tuple[str, ...] = (FULL_TRANSFER, BASE, "full", "partial:0.5", "threshold")
    worker_flags: tuple[str, ...] = ()

    @property
    def rivals(self) -> tuple[str, ...]:
        """The policies that run on the same cluster as ``ppd``."""
        return tuple(policy for policy in self.policies if policy != REPLICA)

    def seeds_of(self, trace: Trace) -> tuple[int, ...]:
        """Return the seeds of a trace: its own, or those of all."""
        return trace.seeds or self.seeds


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways that are compared."""

    policy: str
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """The name in rows and tables: the policy, with its weights if it has any."""
        if self.weights is None:
            return self.policy
        return f"{self.policy} {self.weights.ttft:g}:{self.weights.tpot:g}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that give a request its weights."""
        if self.weights is None:
            return {}
        named = {"X-PPD-W-TTFT": self.weights.ttft, "X-PPD-W-TPOT": self.weights.tpot}
        return {name: f"{weight:g}" for name, weight in named.items()}


def ways(config: Comparison) -> list[Way]:
    """Return all ways of a comparison."""
    return [Way(policy) for policy in config.policies] + [
        Way(PPD, weights) for weights in config.weightings
    ]


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
    yield from (problem for weighting in config.weightings if (problem := weighting.problem()))


def window(
    trace: Trace, files: Mapping[str, Path], tokenizer: Path | None, seed: int
) -> list[Conversation]:
    """The conversations of one seed: the seed's window of the trace, from its own beginning.

    Raises:
        ConfigError: a file is missing or broken, or the trace has no such window.
    """
    names = [name for _, name, _, _ in Formatter().parse(trace.workload) if name is not None]
    if missing := [name for name in names if name not in files]:
        raise ConfigError(f"trace {trace.name}: give --data {missing[0]}=FILE")
    spec = trace.workload.format_map(files)
    # Sizes and times as they are: the window is cut out first, then brought to its rate.
    arrivals = "poisson" if trace.poisson else None
    demand = Demand(spec, arrivals, scale=trace.scale, tokenizer=tokenizer)
    whole = plan(replace(demand, qps=trace.qps) if trace.poisson else demand)
    first = seed * trace.conversations
    if trace.poisson:  # they have no order: each seed draws its own
        source = random.Random(f"{trace.name}/{seed}")
        chosen = [source.choice(whole) for _ in range(trace.conversations)]
        assert trace.qps is not None
        return starting(chosen, poisson_starts(len(chosen), trace.qps, source))
    if len(whole) < first + trace.conversations:
        raise ConfigError(
            f"trace {trace.name}: has {len(whole)} conversations, seed {seed} wants those from "
            f"{first} to {first + trace.conversations}"
        )
    chosen = whole[first : first + trace.conversations]
    starts_s = [conversation.starts_at_s - chosen[0].starts_at_s for conversation in chosen]
    return starting(chosen, starts_s if trace.qps is None else at_rate(starts_s, trace.qps))
