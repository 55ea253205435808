"""Vector searches in a disaggregated cluster: on every GPU, on the prefill GPUs, or in a pool.

The three architectures are those of Trinity (arXiv 2512.02281, section 2). Every turn searches once
before its prefill, and again after every so many tokens of its reply, which waits meanwhile. A GPU
runs a step or searches: a search that comes to a GPU waits for the step that runs there. A pool
does nothing else, and searches enter and leave it between the expansions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from ppd.errors import ConfigError

from ..profiles.profile import Profile
from .cache import SharedPrefix
from .clock import Clock
from .engine import Engine, Job
from .link import Link
from .lockstep import Lockstep, Then
from .machine import CHUNKING
from .profile_costs import ProfileCosts

_HISTORY = 1  # number of the prefix that stands for a conversation's cached history


class Architecture(StrEnum):
    """Where searches run.

    ``coupled``: on the GPU that needs the passage; every GPU holds the index. ``prefill``: on the
    prefill GPUs, which hold it. ``pool``: on GPUs that do nothing else.
    """

    COUPLED = "coupled"
    PREFILL = "prefill"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class Index:
    """A graph index of fixed degree, with full vectors."""

    rows: float = 10e6
    dimensions: int = 768
    bytes_per_value: int = 2
    degree: int = 32

    @property
    def row_bytes(self) -> int:
        """The size of one vector."""
        return self.dimensions * self.bytes_per_value

    @property
    def bytes(self) -> float:
        """The size of vectors and graph."""
        return self.rows * (self.row_bytes + 4 * self.degree)


@dataclass(frozen=True, slots=True)
class SearchCost:
    """What a search takes. These values are assumed, because none was measured on a GPU.

    Attributes:
        expansions: nodes whose neighbours it reads, one after the other.
        hop_ms: of one expansion alone: a read that the next one depends on.
        memory_share: of the peak bandwidth, that reads of single rows reach.
        round_trip_ms: to another GPU's server and back.
    """

    expansions: int = 96
    hop_ms: float = 0.006
    memory_share: float = 0.35
    round_trip_ms: float = 0.3

    def hop_of(self, lanes: int, index: Index, memory_bytes_per_s: float) -> float:
        """Return the milliseconds of one expansion of so many searches side by side."""
        read = lanes * index.degree * index.row_bytes
        return max(self.hop_ms, 1e3 * read / (memory_bytes_per_s * self.memory_share))


@dataclass(frozen=True, slots=True)
class Turns:
    """Later turns, all of one size.

    Attributes:
        per_s: of the whole cluster.
        context_tokens: held by every worker already.
        probe_tokens: between two searches of a reply.
    """

    per_s: float
    seconds: float = 20.0
    new_tokens: int = 512
    context_tokens: int = 2048
    output_tokens: int = 256
    probe_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers of each kind; a worker is one GPU, or several with tensor parallelism."""

    prefill: int
    decode: int
    pool: int = 0


@dataclass(slots=True)
class Measured:
    """What a run took, in ms; one value for each turn or search."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    prefill_search_ms: list[float] = field(default_factory=list)
    decode_search_ms: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    kv_tokens: int = 0


class _Smaller(ProfileCosts):
    """A worker whose memory holds an index, too.

    Raises:
        ConfigError: the index leaves no room for KV.
    """

    def __init__(self, profile: Profile, link_gbps: float, index_bytes: float) -> None:
        super().__init__(profile, link_gbps)
        self._index_tokens = int(index_bytes / profile.kv_bytes_per_token)
        if self.kv_capacity_tokens <= 0:
            raise ConfigError(
                f"an index of {index_bytes / 1e9:,.1f} GB leaves no KV on {profile.file.name}"
            )

    @property
    def kv_capacity_tokens(self) -> int:
        """The tokens of KV that fit beside the index."""
        return super().kv_capacity_tokens - self._index_tokens


class _Pool:
    """A device that only searches; searches join and leave between two rounds of expansions."""

    _ROUND = 8  # expansions between two changes of the batch

    def __init__(
        self, clock: Clock, cost: SearchCost, index: Index, memory_bytes_per_s: float
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._hop_ms = partial(cost.hop_of, index=index, memory_bytes_per_s=memory_bytes_per_s)
        self._waiting: list[Then] = []
        self._lanes: list[tuple[int, Then]] = []  # expansions left
        self._runs = False

    @property
    def load(self) -> int:
        """How many searches are there."""
        return len(self._waiting) + len(self._lanes)

    def search(self, then: Then, now_ms: float) -> None:
        """Search, and call ``then`` at the end."""
        self._waiting.append(then)
        if not self._runs:
            self._round(now_ms)

    def _round(self, now_ms: float) -> None:
        self._lanes += [(self._cost.expansions, then) for then in self._waiting]
        self._waiting.clear()
        self._runs = bool(self._lanes)
        if self._runs:
            ms = self._ROUND * self._hop_ms(len(self._lanes))
            self._clock.at(now_ms + ms, self._end_round)

    def _end_round(self, now_ms: float) -> None:
        lanes = [(left - self._ROUND, then) for left, then in self._lanes]
        self._lanes = [(left, then) for left, then in lanes if left > 0]
        for left, then in lanes:
            if left <= 0:
                then(now_ms)
        self._round(now_ms)


class SearchSimulation:
    """A cluster whose turns search.

    Args:
        memory_bytes_per_s: peak bandwidth of a worker's memory.
        index: in the memory of each worker that holds it.

    Raises:
        ConfigError: the index does not fit a worker.
    """

    def __init__(
        self,
        where: Architecture,
        workers: Workers,
        turns: Turns,
        profile: Profile,
        link_gbps: float,
        memory_bytes_per_s: float,
        *,
        index: Index,
        cost: SearchCost,
    ) -> None:
        self._where, self._turns, self._cost = where, turns, cost
        self._index, self._memory = index, memory_bytes_per_s
        self._clock = Clock()
        plain = ProfileCosts(profile, link_gbps)
        on_prefill = on_decode = plain
        if where is not Architecture.POOL:
            on_prefill = _Smaller(profile, link_gbps, index.bytes)
        if where is Architecture.COUPLED:
            on_decode = on_prefill
        self._prefill = [self._engine(on_prefill) for _ in range(workers.prefill)]
        self._decode = [self._engine(on_decode) for _ in range(workers.decode)]
        self._links = [Link(plain.transfer_ms) for _ in self._prefill]
        self._pools = [
            _Pool(self._clock, cost, index, memory_bytes_per_s) for _ in range(workers.pool)
        ]
        self._in_flight = [0] * workers.decode
        self._sent = [0] * workers.prefill
        self.measured = Measured(kv_tokens=on_decode.kv_capacity_tokens)

    def _engine(self, costs: ProfileCosts) -> Engine:
        return Engine(costs, Lockstep(self._clock.at), CHUNKING.step_tokens, None)

    def run(self, seed: int) -> Measured:
        """Simulate all turns."""
        source = random.Random(seed)
        at_s, number = source.expovariate(self._turns.per_s), 0
        while at_s < self._turns.seconds:
            self._clock.at(at_s * 1e3, partial(self._arrive, number))
            at_s += source.expovariate(self._turns.per_s)
            number += 1
        self._clock.run()
        self.measured.ended_s = self._clock.now_ms / 1e3
        return self.measured

    def _arrive(self, number: int, now_ms: float) -> None:
        prefill = min(range(len(self._prefill)), key=self._sent.__getitem__)
        self._sent[prefill] += 1

        def found(then_ms: float) -> None:
            self.measured.prefill_search_ms.append(then_ms - now_ms)
            job = self._job(number, 0, has_kv=False, done=computed)
            self._prefill[prefill].submit(job, then_ms)

        def computed(then_ms: float) -> None:
            self._sent[prefill] -= 1
            arrived_ms = self._links[prefill].send(self._turns.new_tokens, then_ms)
            self._clock.at(arrived_ms, partial(self._decode_turn, number, now_ms))

        self._search(self._prefill[prefill], found, now_ms, on_own=True)

    def _decode_turn(self, number: int, since_ms: float, now_ms: float) -> None:
        decode = min(range(len(self._decode)), key=self._in_flight.__getitem__)
        self._in_flight[decode] += 1
        turns, engine, measured = self._turns, self._decode[decode], self.measured
        generated, first_ms = 0, 0.0

        def first(then_ms: float) -> None:
            nonlocal first_ms
            if generated == 0:
                first_ms = then_ms
                measured.ttft_ms.append(then_ms - since_ms)

        def submit(then_ms: float) -> None:
            job = self._job(number, generated, has_kv=True, done=generate)
            job.first = first
            engine.submit(job, then_ms)

        def generate(then_ms: float) -> None:
            nonlocal generated
            generated += turns.probe_tokens
            if generated >= turns.output_tokens:
                self._in_flight[decode] -= 1
                tokens = max(1, turns.output_tokens - 1)
                measured.tpot_ms.append((then_ms - first_ms) / tokens)
                return

            def found(found_ms: float) -> None:
                measured.decode_search_ms.append(found_ms - then_ms)
                submit(found_ms)

            on_own = self._where is Architecture.COUPLED
            self._search(engine if on_own else self._least_busy(), found, then_ms, on_own=on_own)

        submit(now_ms)

    def _job(
        self, number: int, generated: int, *, has_kv: bool, done: Callable[[float], None]
    ) -> Job:
        turns = self._turns
        # The token that comes with the KV was generated before the search.
        output = min(turns.probe_tokens, turns.output_tokens - generated) + (generated > 0)
        return Job(
            session=number,
            prompt_tokens=turns.context_tokens + turns.new_tokens + generated,
            output_tokens=output if has_kv else 0,
            has_kv=has_kv,
            done=done,
            shared=SharedPrefix(_HISTORY, turns.context_tokens),
        )

    def _least_busy(self) -> Engine:
        return self._prefill[min(range(len(self._prefill)), key=self._sent.__getitem__)]

    def _search(self, engine: Engine, then: Then, now_ms: float, *, on_own: bool) -> None:
        """Search on an engine, or in the pool; ``then`` has the way back in it."""
        round_trip_ms = (
            0.0 if on_own and self._where is not Architecture.POOL else self._cost.round_trip_ms
        )

        def back(end_ms: float) -> None:
            self._clock.at(end_ms + round_trip_ms / 2, then)

        if self._where is Architecture.POOL:
            pool = min(self._pools, key=lambda one: one.load)
            self._clock.at(now_ms + round_trip_ms / 2, partial(pool.search, back))
            return
        ms = self._cost.expansions * self._cost.hop_of(1, self._index, self._memory)
        self._clock.at(now_ms + round_trip_ms / 2, partial(engine.search, ms, back))
