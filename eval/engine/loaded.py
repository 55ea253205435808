"""The loaded part of ``ppd-eval bench engine``: later turns on both ways, open loop."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from ..client import hold
from ..cluster import Process
from ..endpoints import empty_caches
from ..traffic.conversations import Conversation, PlannedTurn

_RATES = (0.5, 1.0, 1.3)  # conversations a second
_FIRST, _LATER, _OUTPUT, _TURNS = 1536, 32, 16, 4


async def load(
    http: aiohttp.ClientSession,
    routers: Mapping[str, Process],
    workers: Sequence[Process],
    vocabulary: range,
    seeds: Sequence[int],
    conversations: int,
) -> list[dict[str, Any]]:
    """Measure every rate, seed and way; return a row for each turn."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for number, rate in enumerate(_RATES):
            ways = sorted(routers, reverse=(number + seed) % 2 == 0)
            for way in ways:
                await empty_caches(http, [worker.url for worker in workers])
                samples = await hold(
                    routers[way].url,
                    arrivals(rate, seed, conversations),
                    seed=f"{rate}/{seed}",
                    vocabulary=vocabulary,
                )
                rows += [
                    {"qps": rate, "seed": seed, "way": way, **asdict(sample)} for sample in samples
                ]
                print(f"  loaded: {rate} conv/s, seed {seed}, {way}", file=sys.stderr, flush=True)
    return rows


def arrivals(rate: float, seed: int, conversations: int) -> list[Conversation]:
    """Return exactly as many conversations as the rate demands, at random times."""
    source = random.Random(f"{rate}/{seed}")
    starts = sorted(source.uniform(0.0, conversations / rate) for _ in range(conversations))
    turns = (PlannedTurn(_FIRST, _OUTPUT), *([PlannedTurn(_LATER, _OUTPUT)] * (_TURNS - 1)))
    return [Conversation(start_s, turns) for start_s in starts]


def summarize_load(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Summarize the later turns at each rate, over all seeds."""
    for rate in _RATES:
        row: dict[str, Any] = {"qps": rate}
        for way in ("delta", "local"):
            later = [r for r in rows if (r["qps"], r["way"]) == (rate, way) and r["turn"] > 1]
            fine = [r for r in later if not r["error"]]
            ttft = sorted(r["ttft_ms"] for r in fine)
            row[f"{way}_p50_ms"] = median(ttft)
            row[f"{way}_p90_ms"] = round(statistics.quantiles(ttft, n=10)[-1], 3)
            row[f"{way}_tpot_ms"] = median([r["tpot_ms"] for r in fine])
            row[f"{way}_failed"] = len(later) - len(fine)
        yield row


def median(values: Sequence[float]) -> float | None:
    """Return the median to three digits, or None of no values."""
    return round(statistics.median(values), 3) if values else None
