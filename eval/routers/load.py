"""The loads of ``bench router``, and what is measured under each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from ..http_stream import Reply


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that are open at once, each of ``chunks`` in bursts every ``interval_s``.

    Attributes:
        interval_s: 0: the workers send as fast as they can.
        slices: a round measures the load so often, each time with as large a part of the chunks.
    """

    name: str
    streams: int
    chunks: int
    interval_s: float
    burst: int = 1
    window: float = 0.6  # of all chunks: counted when all streams are open, and none has ended
    slices: int = 1

    @property
    def wanted_per_s(self) -> float | None:
        """Chunks per second of all streams; None if the load has no pace."""
        return self.streams * self.burst / self.interval_s if self.interval_s else None


LOADS = (
    Load("burst", 32, 512, 0.1, 32, slices=4),
    Load("paced_1", 1, 150, 0.02),
    Load("paced_64", 64, 150, 0.02),
    Load("paced", 512, 150, 0.02, slices=3),
    Load("open_4096", 4096, 16, 0.5),
    Load("saturated", 64, 2048, 0.0, slices=2),
)


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen of a router in a part of a load.

    Attributes:
        chunks, reads: received by the clients of all streams.
        wall_s, cpu_s: duration, and the router's CPU time in it.
        mb: the router's resident memory at its end.
        shares: CPU time of each of the router's child processes, as a share of all of them.
        slip_s: p99 of how late the worker's steps began: workers and clients share a core.
    """

    chunks: int
    reads: int
    wall_s: float
    cpu_s: float
    mb: float
    shares: Sequence[float]
    slip_s: float | None

    def costs(self, load: Load) -> dict[str, float]:
        """Return the figures of a slice, by name; see ``COSTS``."""
        chunks = max(1, self.chunks)
        found = {
            "cpu_us_per_chunk": 1e6 * self.cpu_s / chunks,
            "reads_per_chunk": self.reads / chunks,
            "core_use": self.cpu_s / self.wall_s,
        }
        if (wanted := load.wanted_per_s) is not None:
            found["pace"] = self.chunks / self.wall_s / wanted
        else:
            found["chunks_per_s"] = self.chunks / self.wall_s
        if self.slip_s is not None:
            found["slip_p99_ms"] = 1e3 * self.slip_s
        if len(self.shares) > 1:
            found["fairness"] = min(self.shares) * len(self.shares)
        return found


def latencies(replies: Sequence[Reply], prefix: str = "") -> dict[str, float]:
    """Return p50 and p99 of TTFT and ITL in ms; a read's first chunk has the whole gap.

    Args:
        replies: streams of a connection that keeps the times of chunks, or whole replies.
    """
    gaps = list(chain.from_iterable(gaps_of(reply.stamps) for reply in replies))
    return {
        **_percentiles(f"{prefix}ttft", (reply.ttft_s for reply in replies)),
        **(_percentiles(f"{prefix}itl", gaps) if gaps else {}),
    }


def gaps_of(stamps: Sequence[float]) -> list[float]:
    """Return the times between successive chunks, in s."""
    return [later - earlier for earlier, later in pairwise(stamps)]


def _percentiles(name: str, values_s: Iterable[float]) -> dict[str, float]:
    values = [1e3 * value for value in values_s]
    if len(values) == 1:
        return {f"{name}_p50_ms": values[0], f"{name}_p99_ms": values[0]}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}


def one_core(row: Mapping[str, object]) -> dict[str, float]:
    """Return what one core would carry if the router had all of it, from its cost of each."""
    costs = {
        "chunks_per_s_one_core": "cpu_us_per_chunk_saturated",
        "requests_per_s_one_core": "cpu_us_per_request",
    }
    return {name: 1e6 / float(str(row[cost])) for name, cost in costs.items() if cost in row}
