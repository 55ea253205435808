"""The configuration of a sweep, and the conversations of each of its runs.

Pure values: what is to be measured. Clusters and results are no part of it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Weights
from ppd.table_file import Axes

from ..traffic.conversations import Conversation, PlannedTurn, poisson_starts
from ..traffic.kinds import first_turn_tokens

Workload = tuple[int, int, int]  # bins of context, new and output tokens

REMOTE, LOCAL = "pd", "full"  # the policies whose later turns are all remote, all local
_ROUTES = {REMOTE: Route.REMOTE, LOCAL: Route.LOCAL}
_MIN_FIRST = 64  # tokens of a first turn: less is no context to make
REPLICAS = "replica"  # the policy of a cluster of nothing else
_SHAPE = re.compile(r"(?=.)(?:([1-9]\d?)P([1-9]\d?)D)?(?:([1-9]\d?)R)?")


class ClusterAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The URLs of a cluster's workers; the sweep starts routers of its own for it."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    replica: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all its workers."""
        return (*self.prefill, *self.decode, *self.replica)


class Adaptive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a sweep that measures only what decisions depend on (``eval.sweep.choice``).

    Attributes:
        wrong: the chance of a wrong route that may remain in any cell.
        start: share of the cells that are measured first, spread over the grid.
        most: share of the grid's runs that may be used.
        weightings: for which of them decisions shall be right.
    """

    wrong: float = 0.05
    start: float = 0.3
    most: float = 1.0
    weightings: tuple[Weights, ...] = (Weights(), Weights(tpot=3.0), Weights(ttft=3.0))


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a sweep (see ``cpu.toml``).

    Attributes:
        shape: ``2P1D`` for two prefill workers and one decode worker, ``1P1D2R`` with two workers
            that do both beside them: what is measured is what those conversations take that
            live on decode workers. ``4R``: nothing else, measured for comparison (no table).
        conversations: of a run, for each worker that decodes.
        policies: what every cell is measured with; ``pd`` and ``full`` make the table. Of replicas
            alone ``replica``.
        clusters: to measure on, in parallel; none: ``clusters_here`` are started on this machine.
        more_seeds: of cells in which noise decides after all ``seeds`` (``eval.certainty``).
        hardware: of ``clusters``, which is not found out by itself.
        note: how it was measured, for the users of the table.
    """

    shape: str
    turns: int
    conversations: int
    quiet_conversations: int
    think_s: float
    seeds: tuple[int, ...]
    axes: Axes
    worker_flags: tuple[str, ...] = ()
    policies: tuple[str, ...] = (REMOTE, LOCAL)
    clusters: tuple[ClusterAt, ...] = ()
    clusters_here: int = 1
    hardware: str = ""
    adaptive: Adaptive | None = None
    more_seeds: tuple[int, ...] = ()
    note: str = ""

    @property
    def digest(self) -> str:
        """A hash of all that a measured row depends on.

        Seeds and clusters are no part of it, nor is what an adaptive sweep chooses next.
        """
        free = {"seeds": None, "clusters": None, "clusters_here": None, "adaptive": None}
        fields = msgspec.to_builtins(self) | free
        del fields["note"], fields["more_seeds"]
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:12]

    @property
    def workers(self) -> tuple[int, int, int]:
        """The numbers of prefill and decode workers and of replicas."""
        found = _SHAPE.fullmatch(self.shape)
        assert found is not None
        return int(found[1] or 0), int(found[2] or 0), int(found[3] or 0)

    @property
    def makes_table(self) -> bool:
        """Whether there are two routes to choose from."""
        return self.workers[0] > 0

    def require_table(self) -> None:
        """Check that a table can be made of this sweep.

        Raises:
            ConfigError: no table can be made of this sweep.
        """
        if not self.makes_table:
            raise ConfigError(f"{self.shape} has no routes to compare: there is no table of it")

    @property
    def homes(self) -> int:
        """The number of workers that decode."""
        _, decode, replica = self.workers
        return decode + replica

    def workloads(self) -> Iterator[Workload]:
        """Yield all workloads of the grid."""
        a = self.axes
        sizes = (a.context_tokens, a.new_tokens, a.output_tokens)
        yield from product(*(range(len(bins)) for bins in sizes))

    def contexts(self, workload: Workload) -> list[int]:
        """Return the tokens of the first turn, then the context of each later one."""
        context, new, output = self._tokens(workload)
        first = first_turn_tokens(context, new, output, self.turns)
        return [first, *(first + output + k * (new + output) for k in range(self.turns - 1))]

    def planned_turns(self, workload: Workload, source: random.Random) -> tuple[PlannedTurn, ...]:
        """Draw the turns of one conversation."""
        _, new, output = self._tokens(workload)
        first = PlannedTurn(self.contexts(workload)[0], output)
        thinks = (source.expovariate(1 / self.think_s) for _ in range(self.turns - 1))
        return (first, *(PlannedTurn(new, output, think_s) for think_s in thinks))

    def _tokens(self, workload: Workload) -> tuple[int, int, int]:
        c, n, o = workload
        a = self.axes
        return (
            round(a.context_tokens[c].at),
            round(a.new_tokens[n].at),
            round(a.output_tokens[o].at),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """One place in the grid: a workload and a bin of the rate.

    Attributes:
        qps: None: it is measured quiet, one conversation at a time.
    """

    workload: Workload
    qps: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """One place under one policy with one seed."""

    place: Place
    policy: str
    seed: int

    @property
    def route(self) -> Route | None:
        """The route that all later turns should take; None if the policy takes both."""
        return _ROUTES.get(self.policy)


def load_config(path: Path) -> SweepConfig:
    """Read the configuration of a sweep.

    Raises:
        ConfigError: the file is missing, or not a sweep that can be run.
    """
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=SweepConfig)
    except (OSError, ValueError) as error:  # of TOML's syntax, and of msgspec's types
        raise ConfigError(f"{path}: {error}") from error
    if problems := list(_problems(config)):
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return config


def _problems(config: SweepConfig) -> Iterator[str]:
    if not _SHAPE.fullmatch(config.shape):
        yield f"shape must be as 1P1D, 1P1D1R or 2R, 1 to 99 of each, got {config.shape}"
    else:
        yield from _cluster_problems(config)
        yield from _policy_problems(config)
    if config.turns < 2 or config.conversations < 1 or config.quiet_conversations < 1:
        yield "turns must be at least 2, conversations and quiet_conversations at least 1"
    if not config.seeds or not config.think_s > 0:
        yield "seeds must name one, think_s must be above 0"
    if set(config.more_seeds) & set(config.seeds) or (config.more_seeds and config.adaptive):
        yield "more_seeds must be others than seeds, and have no place beside [adaptive]"
    if config.adaptive is not None:
        yield from _adaptive_problems(config.adaptive)
    if not all(bins for _, bins in config.axes.each()):
        yield "each axis must have a bin"
    elif config.turns >= 2:
        yield from _size_problems(config)


def _cluster_problems(config: SweepConfig) -> Iterator[str]:
    for number, cluster in enumerate(config.clusters):
        if (len(cluster.prefill), len(cluster.decode), len(cluster.replica)) != config.workers:
            got = f"{len(cluster.prefill)}P{len(cluster.decode)}D{len(cluster.replica)}R"
            yield f"clusters[{number}] must be {config.shape}, the shape, got {got}"
    urls = [url for cluster in config.clusters for url in cluster.urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"workers must be given as http:// or https:// URLs, got {url}"
    if len(set(urls)) < len(urls):
        yield "a worker stands twice in clusters: what is measured at once must not share workers"
    if config.clusters and not config.hardware:
        yield "clusters need hardware, a name of what they run on"
    if not 1 <= config.clusters_here <= 64:
        yield f"clusters_here must be 1 to 64, got {config.clusters_here}"


def _policy_problems(config: SweepConfig) -> Iterator[str]:
    if not config.makes_table:
        if config.policies != (REPLICAS,):
            yield f'of replicas alone policies must be ["{REPLICAS}"], got {list(config.policies)}'
        if config.adaptive is not None:
            yield "of replicas alone there are no decisions that an adaptive sweep could look for"
        return
    if missing := {REMOTE, LOCAL} - set(config.policies):
        yield f"policies must have {' and '.join(sorted(missing))}: the table compares them"
    if len(set(config.policies)) < len(config.policies):
        yield "a policy stands twice"
    for name in config.policies:
        try:
            policy = static_policy(name)
        except ConfigError as error:
            yield str(error)
            continue
        if policy.opening is Route.REPLICA:
            yield "policy replica has no routes to compare"


def _adaptive_problems(adaptive: Adaptive) -> Iterator[str]:
    for name, low, high in (("wrong", 0.0, 0.5), ("start", 0.0, 1.0), ("most", 0.0, 1.0)):
        if not low < (value := getattr(adaptive, name)) <= high:
            yield f"adaptive.{name} must be above {low:g} and at most {high:g}, got {value:g}"
    if not adaptive.weightings:
        yield "adaptive.weightings must name one"
    yield from (problem for weighting in adaptive.weightings if (problem := weighting.problem()))
    if any(weighting.throughput for weighting in adaptive.weightings):
        yield "adaptive.weightings: the choice of cells weighs TTFT and TPOT, not throughput"


def _size_problems(config: SweepConfig) -> Iterator[str]:
    for workload in config.workloads():
        first, *later = config.contexts(workload)
        held = config.axes.context_tokens[workload[0]]
        if first < _MIN_FIRST or not all(held.low <= context < held.high for context in later):
            yield (
                f"context {held.at:g} with {config.axes.new_tokens[workload[1]].at:g} new tokens: "
                f"the first turn would have {first} tokens (at least {_MIN_FIRST}), the later "
                f"ones a context of {later}, which must stay in [{held.low:g}, {held.high:g})"
            )


def plan(config: SweepConfig, place: Place, seed: int) -> list[Conversation]:
    """The conversations of a run, the same for all policies.

    Those of a quiet run are held one after the other. The rate of a cell is turns a second for
    each worker that decodes (``ppd.arrivals``).
    """
    source = random.Random(f"{place.workload}/{place.qps}/{seed}")
    if place.qps is None:
        starts_s = [0.0] * config.quiet_conversations
    else:
        turns_per_s = config.axes.qps[place.qps].at * config.homes
        number = config.conversations * config.homes
        starts_s = poisson_starts(number, turns_per_s / config.turns, source)
    return [Conversation(at_s, config.planned_turns(place.workload, source)) for at_s in starts_s]
