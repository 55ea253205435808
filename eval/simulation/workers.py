"""The workers of a simulated cluster, as the planner sees them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import assert_never

from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.headroom import Headroom
from ppd.pacing import Pacer
from ppd.placement import WorkerView, place

from .cost_model import Costs
from .engine import Engine, Job, Timer
from .link import Link


class PlacementRule(StrEnum):
    """Where a new conversation gets its home.

    ``chance``: on any worker, each as likely. ``bounded-hash``: as our router does it, rendezvous
    hashing that passes over workers with more than 1.25 times the mean load. ``least-loaded``: on
    the worker with the fewest requests. Load is the turns under way, as the router counts them: a
    worker has it only later. In these three a first turn is prefilled by any worker, each as
    likely. ``router-hash`` and ``router-load`` choose prefill workers, too, as the router does with
    ``placement`` of the same name.
    """

    CHANCE = "chance"
    BOUNDED_HASH = "bounded-hash"
    LEAST_LOADED = "least-loaded"
    ROUTER_HASH = "router-hash"
    ROUTER_LOAD = "router-load"


@dataclass(frozen=True, slots=True)
class Chunking:
    """
    Attributes:
        step_tokens: most of one forward; the default is vLLM's on such GPUs.
        paced_tokens: most of a chunk on decode workers that append, chosen by ``ppd.pacing``
            beside decodes; None: as many as fit a step.
    """

    step_tokens: int = 8192
    paced_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How many workers of each kind; ``appending`` ones (the paper's pD) are decode workers that
    take local turns."""

    prefill: int = 0
    decode: int = 0
    appending: int = 0
    replica: int = 0

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From the paper's notation: ``1P_2D_1pD``, ``4R``.

        Raises:
            ConfigError: it is none, or a cluster that can serve no request.
        """
        counts: dict[str, int] = {}
        for part in text.split("_"):
            found = re.fullmatch(r"(\d{1,5})(P|D|pD|R)", part)
            if found is None or found[2] in counts:
                raise ConfigError(f"no such shape: {text!r}; it is as 1P_2D_1pD or 4R")
            counts[found[2]] = int(found[1])
        shape = cls(*(counts.get(kind, 0) for kind in ("P", "D", "pD", "R")))
        disaggregated = shape.decode + shape.appending
        if bool(shape.prefill) != bool(disaggregated) or not shape.workers:
            raise ConfigError(f"shape {text!r}: P and D need each other, and one worker is needed")
        return shape

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.appending + self.replica


class SimulatedWorker:
    """One worker; a ``ppd.placement.WorkerView``.

    Args:
        start: makes the engine of a new process.

    Attributes:
        in_flight: requests that it decodes or prefills, or shall.
        alive: its process runs.
        ready: the cluster gives it work; follows ``alive`` with the next probe.
    """

    page_size = 1

    def __init__(
        self, name: str, role: Role, start: Callable[[], Engine], *, takes_appends: bool
    ) -> None:
        self.name = self.identity = name
        self.role = role
        self.engine = start()
        self.takes_appends = takes_appends
        self.in_flight = 0
        self.headroom = Headroom()
        self.alive = self.ready = True
        self._start = start
        self._starts = 1
        self._evicted_tokens = 0  # by processes that have died

    def die(self, now_ms: float) -> dict[Job, int]:
        """End the process.

        Returns:
            The requests that it decoded, and how many tokens of their replies had been generated.
        """
        self.alive = False
        self._evicted_tokens += self.engine.cache.evicted_tokens
        return self.engine.stop(now_ms)

    def restart(self) -> None:
        """Start another process, whose KV cache is empty."""
        assert not self.alive, "outages of one worker do not overlap"
        self.alive = True
        self.engine = self._start()
        self._starts += 1

    def probe(self) -> None:
        """Have the cluster see whether it runs, and whether it is another process."""
        self.ready = self.alive
        identity = self.name if self._starts == 1 else f"{self.name}/{self._starts}"
        if self.alive and identity != self.identity:
            self.identity, self.headroom = identity, Headroom()

    @property
    def all_evicted_tokens(self) -> int:
        """Tokens evicted for want of room, by all its processes."""
        current = self.engine.cache.evicted_tokens if self.alive else 0
        return self._evicted_tokens + current

    @property
    def running(self) -> int:
        """Requests decoding there."""
        return self.engine.sequences

    @property
    def free_tokens(self) -> int:
        """KV left, evictable cache counted as free."""
        return self.engine.cache.free_tokens

    def has_room(self, tokens: int) -> bool:
        """True: admission by KV is not simulated."""
        return True

    def evicted_tokens(self, session: int) -> int:
        """0: the router of a simulated cluster gets no KV events."""
        return 0


class Cluster:
    """A ``ppd.placement.ClusterView`` of simulated workers.

    Attributes:
        homes: workers that a conversation can have as its home.
        links: of the prefill workers, by name.
    """

    def __init__(
        self,
        costs: Costs,
        shape: Shape,
        timer: Timer,
        source: random.Random,
        chunking: Chunking,
        placement: PlacementRule = PlacementRule.CHANCE,
    ) -> None:
        self._placement = placement
        self._source = source
        self._assigned: dict[bytes, SimulatedWorker] = {}  # home by root
        self._sessions: dict[bytes, int] = {}  # by root

        def start(paced: bool) -> Engine:
            max_tokens, pacer = chunking.step_tokens, None
            if chunking.paced_tokens is not None and paced:
                max_tokens = chunking.paced_tokens
                pacer = Pacer(full_chunk=max_tokens, page_size=1, mixed=True)
            return Engine(costs, timer, max_tokens, pacer)

        def worker(name: str, role: Role, *, appends: bool, paced: bool = False) -> SimulatedWorker:
            return SimulatedWorker(name, role, partial(start, paced), takes_appends=appends)

        prefill = [worker(f"p{i}", Role.PREFILL, appends=False) for i in range(shape.prefill)]
        replicas = [worker(f"r{i}", Role.REPLICA, appends=True) for i in range(shape.replica)]
        decode = [worker(f"d{i}", Role.DECODE, appends=False) for i in range(shape.decode)]
        decode += [
            worker(f"a{i}", Role.DECODE, appends=True, paced=True) for i in range(shape.appending)
        ]
        self._of = {Role.PREFILL: prefill, Role.DECODE: decode, Role.REPLICA: replicas}
        self.homes = replicas + decode
        self.workers = {one.name: one for one in (*prefill, *self.homes)}
        self.links = {one.name: Link(costs.transfer_ms) for one in prefill}

    def assign(self, root: bytes, session: int) -> None:
        """Give a conversation its home, if it has none or its home is gone."""
        home = self._assigned.get(root)
        if home is None or not home.ready:
            self._sessions[root] = session
            self._assigned[root] = self._choose(self._ready(self.homes) or self.homes, session)

    def named(self, name: str) -> SimulatedWorker:
        """Return the worker of a name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.workers:
            raise ConfigError(f"no worker {name!r}; there are {', '.join(self.workers)}")
        return self.workers[name]

    def _choose(self, ready: Sequence[SimulatedWorker], session: int) -> SimulatedWorker:
        match self._placement:
            case PlacementRule.CHANCE:
                return self._source.choice(ready)
            case PlacementRule.LEAST_LOADED:
                return min(ready, key=lambda one: one.in_flight)
            case PlacementRule.BOUNDED_HASH | PlacementRule.ROUTER_HASH | PlacementRule.ROUTER_LOAD:
                found = place(ready, None, seed=session)
                assert found is not None
                return found
            case _:
                assert_never(self._placement)

    @staticmethod
    def _ready(workers: Sequence[SimulatedWorker]) -> Sequence[SimulatedWorker]:
        return [one for one in workers if one.ready]

    # -- ppd.placement.ClusterView -------------------------------------------------------

    def find(self, identity: str | None) -> SimulatedWorker | None:
        """The worker of that identity, if it may be given work."""
        if identity is None:
            return None
        worker = self.workers.get(identity.partition("/")[0])
        return worker if worker and worker.ready and worker.identity == identity else None

    def ready(self, role: Role) -> Sequence[SimulatedWorker]:
        """The workers of a role that may be given work."""
        return self._ready(self._of[role])

    def has(self, role: Role) -> bool:
        """Whether there is any worker of that role."""
        return bool(self._of[role])

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        """Of prefill workers ``prefer``, else any, each as likely; else the conversation's home.

        Where that is gone or to be avoided, another one is chosen as for a new conversation.
        """
        ready = self.ready(role)
        if role is Role.PREFILL:
            if prefer is not None or not ready:
                return prefer
            return self._source.choice([one for one in ready if one not in avoid] or ready)
        assert root is not None, "a simulated conversation has a home before its first turn"
        for home in (prefer, self._assigned[root]):
            if home in ready and home not in avoid:
                return home
        others = [one for one in ready if one not in avoid] or ready
        return self._choose(others, self._sessions[root]) if others else None

    def opening(self, root: bytes | None) -> Route | None:
        """``REPLICA`` for a conversation whose home is one; else the policy's."""
        assert root is not None
        return Route.REPLICA if self._assigned[root].role is Role.REPLICA else None

    @property
    def decode_workers(self) -> int:
        """How many workers decode."""
        return len(self.homes)
