"""The workers of a simulated cluster, and what the judge may see of them."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from xxhash import xxh3_64_intdigest

from ppd.backlog import Backlog
from ppd.errors import ConfigError
from ppd.pacing import Pacer
from ppd.planning import HomeView

from .cost_model import CostModel
from .engine import Engine, Timer
from .link import Link

_MAX_LOAD = 1.25  # as router.workers: of a worker, against the mean


class Placement(StrEnum):
    """Where a new conversation gets its home.

    ``chance``: on any worker, each as likely. ``bounded-hash``: as our router does it, rendezvous
    hashing that passes over workers with more than 1.25 times the mean load. ``least-loaded``: on
    the worker with the fewest requests. Load is the turns under way, as the router counts them: a
    worker knows only later.
    """

    CHANCE = "chance"
    BOUNDED_HASH = "bounded-hash"
    MIN_LOADED = "least-loaded"


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


class Cluster:
    """A ``ppd.planning.ClusterView``."""

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
        self.under_way: Counter[str] = Counter()  # turns by home
        self.backlog = Backlog()
        self.prefill_workers = [f"p{i}" for i in range(shape.prefill)]
        plain = [f"d{i}" for i in range(shape.decode)]
        appending = [f"a{i}" for i in range(shape.appending)]
        replicas = [f"r{i}" for i in range(shape.replica)]
        self.homes = replicas + plain + appending
        self._replicas = frozenset(replicas)
        self._takes_appends = frozenset(replicas + appending)
        self._source = source
        self.links = {name: Link(costs.transfer_ms) for name in self.prefill_workers}
        self.engines: dict[str, Engine] = {}
        for name in self.prefill_workers + self.homes:
            most, pacer = chunking.step_tokens, None
            if chunking.paced_tokens is not None and name in appending:
                most = chunking.paced_tokens
                pacer = Pacer(full_chunk=most, page_size=1, mixed=True)
            self.engines[name] = Engine(costs, timer, most, pacer)

    @property
    def decode_workers(self) -> int:
        return len(self.homes)

    def place(self, session: int) -> str:
        """A home for a new conversation."""
        match self._placement:
            case Placement.CHANCE:
                return self._source.choice(self.homes)
            case Placement.MIN_LOADED:
                return min(self.homes, key=self.under_way.__getitem__)
            case Placement.BOUNDED_HASH:
                bound = _MAX_LOAD * (1 + self.under_way.total()) / len(self.homes)
                fit = [home for home in self.homes if self.under_way[home] < bound]
                return max(fit, key=lambda home: xxh3_64_intdigest(home.encode(), session))
            case _:
                assert_never(self._placement)

    def opening(self, root: bytes | None) -> None:
        """Homes are given by ``place``, replicas among them."""

    def evicted(self, identity: str | None, session: int) -> int:
        return 0  # whoever is there keeps all

    def is_replica(self, worker: str) -> bool:
        return worker in self._replicas

    def home(self, identity: str) -> HomeView | None:
        engine = self.engines[identity]
        return HomeView(
            takes_appends=identity in self._takes_appends,
            page_size=1,
            running=engine.sequences,
            free_tokens=engine.cache.free_tokens,
        )

    def prefill(self, identity: str | None) -> str | None:
        if identity in self.links:
            return identity
        if not self.prefill_workers:
            return None
        return self._source.choice(self.prefill_workers)
