"""The workers of a simulated cluster, as the planner sees them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import mul
from typing import assert_never

from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.headroom import Headroom
from ppd.pacing import Pacer
from ppd.placement import WorkerView, place

from .cache import HostMemory
from .cost_model import Costs
from .engine import Engine, Job
from .link import Link
from .lockstep import Lockstep, Timer


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
    """How many servers of each kind; ``appending`` ones (the paper's pD) are decode servers that
    take local turns.

    Attributes:
        ranks: of data parallelism that each server of a kind has, in the order of the counts.
    """

    prefill: int = 0
    decode: int = 0
    appending: int = 0
    replica: int = 0
    ranks: tuple[int, int, int, int] = (1, 1, 1, 1)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From the paper's notation: ``1P_2D_1pD``, ``4R``; ``1P_1pDx8`` for 8 ranks.

        Raises:
            ConfigError: it is none, or a cluster that can serve no request.
        """
        found: dict[str, tuple[int, int]] = {}
        for part in text.split("_"):
            match = re.fullmatch(r"(\d{1,5})(P|D|pD|R)(?:x([1-9]\d{0,2}))?", part)
            if match is None or match[2] in found:
                raise ConfigError(f"no such shape: {text!r}; it is as 1P_2D_1pD, 4R or 1P_1pDx8")
            found[match[2]] = int(match[1]), int(match[3] or 1)
        p, d, a, r = (found.get(kind, (0, 1)) for kind in ("P", "D", "pD", "R"))
        shape = cls(p[0], d[0], a[0], r[0], (p[1], d[1], a[1], r[1]))
        disaggregated = shape.decode + shape.appending
        if bool(shape.prefill) != bool(disaggregated) or not shape.workers:
            raise ConfigError(f"shape {text!r}: P and D need each other, and one worker is needed")
        return shape

    @property
    def workers(self) -> int:
        """Workers of all kinds; each rank is one."""
        counts = (self.prefill, self.decode, self.appending, self.replica)
        return sum(map(mul, counts, self.ranks))


class SimulatedServer:
    """One process, whose ranks live and die together.

    Args:
        start: makes the engines of a new process, one for each rank.
        kv_events: the cluster gets its evictions, without delay.

    Attributes:
        alive: it runs.
        ready: the cluster gives it work; follows ``alive`` with the next probe.
        ranks: its workers.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        start: Callable[[], list[Engine]],
        *,
        takes_appends: bool,
        kv_events: bool,
    ) -> None:
        self.name = name
        self.alive = self.ready = True
        self.starts = 1
        self._start = start
        engines = start()
        names = [name] if len(engines) == 1 else [f"{name}@{i}" for i in range(len(engines))]
        self.ranks = [
            SimulatedWorker(
                self, one, role, engine, takes_appends=takes_appends, kv_events=kv_events
            )
            for one, engine in zip(names, engines, strict=True)
        ]

    def die(self, now_ms: float) -> dict[Job, int]:
        """End the process.

        Returns:
            The requests that it decoded, and how many tokens of their replies had been generated.
        """
        self.alive = False
        generated: dict[Job, int] = {}
        for worker in self.ranks:
            worker.past_evicted_tokens += worker.engine.cache.evicted_tokens
            generated |= worker.engine.stop(now_ms)
        return generated

    def restart(self) -> None:
        """Start another process, whose KV caches are empty."""
        assert not self.alive, "outages of one server do not overlap"
        self.alive = True
        self.starts += 1
        for worker, engine in zip(self.ranks, self._start(), strict=True):
            worker.engine = engine

    def probe(self) -> None:
        """Have the cluster see whether it runs, and whether it is another process."""
        self.ready = self.alive
        for worker in self.ranks:
            identity = worker.name if self.starts == 1 else f"{worker.name}/{self.starts}"
            if self.alive and identity != worker.identity:
                worker.identity, worker.headroom = identity, Headroom()


class SimulatedWorker:
    """One rank of a server, most often its only one; a ``ppd.placement.WorkerView``.

    Attributes:
        in_flight: requests that it decodes or prefills, or shall.
        past_evicted_tokens: by processes that have died.
    """

    page_size = 1

    def __init__(
        self,
        server: SimulatedServer,
        name: str,
        role: Role,
        engine: Engine,
        *,
        takes_appends: bool,
        kv_events: bool,
    ) -> None:
        self.server = server
        self.name = self.identity = name
        self.role = role
        self.engine = engine
        self.takes_appends = takes_appends
        self.in_flight = 0
        self.headroom = Headroom()
        self.past_evicted_tokens = 0
        self._kv_events = kv_events

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.server.alive

    @property
    def ready(self) -> bool:
        """Whether the cluster gives it work."""
        return self.server.ready

    @property
    def all_evicted_tokens(self) -> int:
        """Tokens evicted for want of room, by all its processes."""
        current = self.engine.cache.evicted_tokens if self.alive else 0
        return self.past_evicted_tokens + current

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
        """Tokens of a conversation that were evicted since its last request; 0 without events."""
        return self.engine.cache.lost_tokens(session) if self._kv_events else 0


class Cluster:
    """A ``ppd.placement.ClusterView`` of simulated workers.

    Attributes:
        servers: all of them, by name.
        workers: all their ranks, by name.
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
        host: HostMemory | None = None,
        *,
        kv_events: bool = False,
    ) -> None:
        self._placement = placement
        self._source = source
        self._assigned: dict[bytes, SimulatedWorker] = {}  # home by root
        self._sessions: dict[bytes, int] = {}  # by root

        def start(ranks: int, paced: bool) -> list[Engine]:
            max_tokens, lockstep = chunking.step_tokens, Lockstep(timer)
            if chunking.paced_tokens is None or not paced:
                return [Engine(costs, lockstep, max_tokens, None, host) for _ in range(ranks)]
            max_tokens = chunking.paced_tokens
            pacers = [Pacer(full_chunk=max_tokens, page_size=1, mixed=True) for _ in range(ranks)]
            return [Engine(costs, lockstep, max_tokens, pacer, host) for pacer in pacers]

        def servers(
            letter: str, count: int, ranks: int, role: Role, *, appends: bool, paced: bool = False
        ) -> list[SimulatedServer]:
            of_kind = partial(start, ranks, paced)
            return [
                SimulatedServer(
                    f"{letter}{i}", role, of_kind, takes_appends=appends, kv_events=kv_events
                )
                for i in range(count)
            ]

        of_p, of_d, of_a, of_r = shape.ranks
        prefill = servers("p", shape.prefill, of_p, Role.PREFILL, appends=False)
        replicas = servers("r", shape.replica, of_r, Role.REPLICA, appends=True)
        decode = servers("d", shape.decode, of_d, Role.DECODE, appends=False)
        decode += servers("a", shape.appending, of_a, Role.DECODE, appends=True, paced=True)
        self.servers = {one.name: one for one in (*prefill, *replicas, *decode)}
        self._of = {
            role: [worker for server in of_role for worker in server.ranks]
            for role, of_role in (
                (Role.PREFILL, prefill),
                (Role.DECODE, decode),
                (Role.REPLICA, replicas),
            )
        }
        self.homes = self._of[Role.REPLICA] + self._of[Role.DECODE]
        self.workers = {one.name: one for one in (*self._of[Role.PREFILL], *self.homes)}
        self.links = {one.name: Link(costs.transfer_ms) for one in self._of[Role.PREFILL]}
        # Ranks of a server share its network. The paper's machine has no network between GPUs.
        self._receivers: dict[SimulatedServer, Link] = {}
        if costs.overlap:
            receivers = {worker.server for worker in self.homes}
            self._receivers = {server: Link(costs.transfer_ms) for server in receivers}

    def assign(self, root: bytes, session: int) -> None:
        """Give a conversation its home, if it has none or its home is gone."""
        home = self._assigned.get(root)
        if home is None or not home.ready:
            self._sessions[root] = session
            self._assigned[root] = self._choose(self._ready(self.homes) or self.homes, session)

    def send(self, prefill: str, to: SimulatedWorker, tokens: int, now_ms: float) -> float:
        """Transfer KV to a decode worker; return when it has arrived."""
        return self.links[prefill].send(tokens, now_ms, self._receivers.get(to.server))

    def named(self, name: str) -> SimulatedServer:
        """Return the server of a name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.servers:
            raise ConfigError(f"no worker {name!r}; there are {', '.join(self.servers)}")
        return self.servers[name]

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
