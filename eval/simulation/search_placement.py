"""Where vector search runs in a disaggregated cluster: on every GPU, on the prefill GPUs, or in a
pool of its own (Trinity, arXiv 2512.02281, section 2), in the terms of the cost model.

A GPU does one thing at a time. A search that comes to a GPU waits for the step that runs there, and
whatever runs next waits for the search. One search alone is a chain of dependent reads: it takes
its time and leaves the memory idle; only many at once fill it. Waiting times are those of an M/D/1
queue; nothing here is simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .cost_model import CostModel, Extend, Gpu

_LATE = 0.05  # the rarest waits that are looked at: 95th percentile


class Architecture(StrEnum):
    COUPLED = "coupled"  # every GPU has the index and searches for its own requests
    PREFILL = "prefill"  # the prefill GPUs have it and search for all
    POOL = "pool"  # GPUs that do nothing else


@dataclass(frozen=True, slots=True)
class Index:
    """A graph index of fixed degree."""

    rows: float
    dimensions: int
    bytes_per_value: int = 2
    degree: int = 32

    @property
    def row_bytes(self) -> int:
        return self.dimensions * self.bytes_per_value

    @property
    def bytes(self) -> float:
        return self.rows * (self.row_bytes + 4 * self.degree)


@dataclass(frozen=True, slots=True)
class SearchCost:
    """What one search does.

    Attributes:
        expansions: nodes whose neighbours it looks at, one after the other.
        hop_ms: of one expansion alone: a read that the next one hangs on.
        memory_share: of the peak, that reads of single rows reach.
        way_ms: to another GPU's server and back.
    """

    expansions: int = 96
    hop_ms: float = 0.006
    memory_share: float = 0.35
    way_ms: float = 0.3

    @property
    def alone_ms(self) -> float:
        return self.expansions * self.hop_ms

    def bytes(self, index: Index) -> float:
        return float(self.expansions * index.degree * index.row_bytes)

    def max_per_s(self, index: Index, gpu: Gpu) -> float:
        """What the memory lets through."""
        return gpu.memory_bytes_per_s * self.memory_share / self.bytes(index)

    def saturation(self, index: Index, gpu: Gpu) -> float:
        """Searches at once that fill the memory: fewer leave it idle, more wait."""
        return self.max_per_s(index, gpu) * self.alone_ms / 1e3

    def utilisation(self, at_once: float, index: Index, gpu: Gpu) -> float:
        return min(1.0, at_once / self.saturation(index, gpu))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the whole cluster; every turn searches once before its prefill.

    Attributes:
        probe_tokens: decoded tokens between two searches of a reply.
    """

    turns_per_s: float
    new_tokens: int = 512
    context_tokens: int = 2048
    output_tokens: int = 256
    probe_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Gpus:
    """How many do what."""

    prefill: int
    decode: int
    pool: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in ms.

    Attributes:
        prefill_search_ms, decode_search_ms: 95th percentile, with waiting and the way.
        stall: share of a stream's time that it waits for its own searches.
        stolen: share of the decode GPUs' time that searches take from everybody.
        in_flight: searches at once on a GPU that searches, as a share of what fills its memory.
        kv_tokens: room for KV on a decode GPU.
    """

    ttft_ms: float
    tpot_ms: float
    prefill_search_ms: float
    decode_search_ms: float
    stall: float
    stolen: float
    in_flight: float
    kv_tokens: int
    prefill_use: float
    decode_use: float


def outcome(
    where: Architecture,
    gpus: Gpus,
    traffic: Traffic,
    costs: CostModel,
    index: Index,
    search: SearchCost,
) -> Outcome | None:
    """None: the cluster cannot keep up, or the index does not fit."""
    turns = traffic.turns_per_s / gpus.prefill  # of one prefill GPU, a second
    probes = traffic.turns_per_s * (traffic.output_tokens / traffic.probe_tokens)
    searches = {
        Architecture.COUPLED: (turns, probes / gpus.decode, 0.0),
        Architecture.PREFILL: (turns + probes / gpus.prefill, 0.0, 0.0),
        Architecture.POOL: (0.0, 0.0, (traffic.turns_per_s + probes) / max(1, gpus.pool)),
    }
    on_prefill, on_decode, on_pool = searches[where]
    kv_tokens = costs.kv_capacity_tokens
    if where is Architecture.COUPLED:
        kv_tokens -= int(index.bytes / costs.model.kv_bytes_per_token)
    chunk_ms = costs.step_ms(0, 0, [Extend(traffic.new_tokens, traffic.context_tokens)])
    alone_ms = search.alone_ms
    # One by one: a search that has the GPU is most often alone there.
    prefill_use = (turns * chunk_ms + on_prefill * alone_ms) / 1e3
    decoding = _decoding(gpus, traffic, costs, kv_tokens, on_decode * alone_ms / 1e3)
    pool_use = on_pool / search.max_per_s(index, costs.gpu)
    if prefill_use >= 1 or decoding is None or pool_use >= 1 or kv_tokens <= 0:
        return None
    step_ms, sequences, stolen = decoding
    own_ms = {
        Architecture.COUPLED: alone_ms + _residual(chunk_ms, turns * chunk_ms / 1e3),
        Architecture.PREFILL: alone_ms + _residual(chunk_ms, turns * chunk_ms / 1e3),
        Architecture.POOL: search.way_ms + alone_ms / (1 - pool_use),
    }[where]
    probe_ms = {
        Architecture.COUPLED: alone_ms + step_ms,  # behind the step that runs, always
        Architecture.PREFILL: search.way_ms + own_ms,
        Architecture.POOL: own_ms,
    }[where]
    waited_ms = prefill_use / (2 * (1 - prefill_use)) * chunk_ms
    moved = traffic.new_tokens + traffic.context_tokens
    ttft_ms = (
        costs.serving.request_ms
        + own_ms
        + waited_ms
        + chunk_ms
        + moved * costs.transfer_ms
        + costs.serving.handover_ms
        + step_ms
    )
    on_searching = {
        Architecture.COUPLED: max(on_prefill, on_decode),
        Architecture.PREFILL: on_prefill,
        Architecture.POOL: on_pool,
    }[where]
    at_once = on_searching * alone_ms / 1e3
    return Outcome(
        ttft_ms=ttft_ms,
        tpot_ms=step_ms,
        prefill_search_ms=own_ms,
        decode_search_ms=probe_ms,
        stall=probe_ms / (probe_ms + traffic.probe_tokens * step_ms),
        stolen=stolen,
        in_flight=at_once / search.saturation(index, costs.gpu),
        kv_tokens=kv_tokens,
        prefill_use=prefill_use,
        decode_use=sequences * (traffic.context_tokens + traffic.output_tokens) / kv_tokens,
    )


def _decoding(
    gpus: Gpus, traffic: Traffic, costs: CostModel, kv_tokens: int, searched: float
) -> tuple[float, float, float] | None:
    """Time of a step, sequences on a GPU, share that searches take: by Little's law, iterated."""
    turns = traffic.turns_per_s / gpus.decode
    context = traffic.context_tokens + traffic.new_tokens + traffic.output_tokens // 2
    if searched >= 1:
        return None
    step_ms = costs.step_ms(1, context, [])
    for _ in range(200):
        sequences = max(1.0, turns * traffic.output_tokens * step_ms / 1e3)
        if sequences * context > kv_tokens:
            return None
        after = costs.step_ms(math.ceil(sequences), int(sequences * context), []) / (1 - searched)
        if abs(after - step_ms) < 1e-6:
            break
        step_ms = after
    return step_ms, sequences, searched


def _residual(step_ms: float, busy: float) -> float:
    """The 95th percentile of what is left of a step that runs ``busy`` of the time."""
    return step_ms * (1 - _LATE / busy) if busy > _LATE else 0.0
