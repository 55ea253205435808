"""The workers of a simulated cluster, as the planner sees them."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.headroom import Headroom
from ppd.pacing import Pacer
from ppd.placement import WorkerView, place

from .cost_model import CostModel
from .engine import Engine, Timer
from .link import Link


class Placement(StrEnum):
    """Where a new conversation gets its home.

    ``chance``: on any worker, each as likely. ``bounded-hash``: as our router does it, rendezvous
    hashing that passes over workers with more than 1.25 times the mean load. ``least-loaded``: on
    the worker with the fewest requests. Load is the turns under way, as the router counts them: a
    worker knows only later.
    """

    CHANCE = "chance"
    BOUNDED_HASH = "bounded-hash"
    LEAST_LOADED = "least-loaded"


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
            ConfigError: it is none, or a cluster that can serve nobody.
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

    Attributes:
        in_flight: turns whose home it is, under way.
    """

    page_size = 1

    def __init__(self, name: str, role: Role, engine: Engine, *, takes_appends: bool) -> None:
        self.name = self.identity = name
        self.role = role
        self.engine = engine
        self.takes_appends = takes_appends
        self.in_flight = 0
        self.headroom = Headroom()

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
        costs: CostModel,
        shape: Shape,
        timer: Timer,
        source: random.Random,
        chunking: Chunking,
        placement: Placement = Placement.CHANCE,
    ) -> None:
        self._placement = placement
        self._source = source
        self._assigned: dict[bytes, SimulatedWorker] = {}  # home by root

        def worker(name: str, role: Role, *, appends: bool, paced: bool = False) -> SimulatedWorker:
            most, pacer = chunking.step_tokens, None
            if chunking.paced_tokens is not None and paced:
                most = chunking.paced_tokens
                pacer = Pacer(full_chunk=most, page_size=1, mixed=True)
            engine = Engine(costs, timer, most, pacer)
            return SimulatedWorker(name, role, engine, takes_appends=appends)

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

    def assign(self, root: bytes, session: int) -> SimulatedWorker:
        """Give a new conversation its home."""
        match self._placement:
            case Placement.CHANCE:
                home = self._source.choice(self.homes)
            case Placement.LEAST_LOADED:
                home = min(self.homes, key=lambda one: one.in_flight)
            case Placement.BOUNDED_HASH:
                found = place(self.homes, None, seed=session)
                assert found is not None
                home = found
            case _:
                assert_never(self._placement)
        self._assigned[root] = home
        return home

    # -- ppd.placement.ClusterView -------------------------------------------------------

    def find(self, identity: str | None) -> SimulatedWorker | None:
        """The worker of that name."""
        return None if identity is None else self.workers.get(identity)

    def ready(self, role: Role) -> list[SimulatedWorker]:
        """All workers of a role: none of them dies."""
        return self._of[role]

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
        """The conversation's home; of prefill workers ``prefer``, else any, each as likely."""
        if role is not Role.PREFILL:
            assert root is not None, "a simulated conversation has a home before its first turn"
            return self._assigned[root]
        if prefer is not None or not self._of[role]:
            return prefer
        return self._source.choice(self._of[role])

    def opening(self, root: bytes | None) -> Route | None:
        """``REPLICA`` for a conversation whose home is one; else the policy's."""
        assert root is not None
        return Route.REPLICA if self._assigned[root].role is Role.REPLICA else None

    @property
    def decode_workers(self) -> int:
        """How many workers decode."""
        return len(self.homes)
