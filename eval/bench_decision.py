"""``ppd-eval bench decision``: what one decision costs the router, at a million sessions."""

from __future__ import annotations

import gc
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, permutations
from pathlib import Path

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.forecast import Forecast
from ppd.planning import HomeView, Planner, Query
from ppd.prefix import PrefixChain, hash_messages
from ppd.score import Weights
from ppd.sessions import SessionIndex, Turn
from ppd.table import Table
from ppd.table_policy import DEFAULT_CORRECTIONS, Correction, TablePolicy

from . import bench_hash
from .provenance import provenance


class _Cluster:
    """Eight decode workers and two prefill workers that are always ready."""

    decode_workers = 8

    def home(self, identity: str) -> HomeView:
        return HomeView(takes_appends=True, page_size=64, running=20, free_tokens=500_000)

    def prefill(self, identity: str | None) -> str:
        return identity or "p0"

    def evicted(self, identity: str | None, session: int) -> int:
        return 0

    def opening(self, root: bytes | None) -> None:
        return None


def run(table_file: Path, sessions: int, rounds: int, seed: int) -> int:
    """Print one JSON line. ``decide`` looks the conversation up, gathers features, decides."""
    table = Table.parse(table_file.read_bytes())
    source = random.Random(seed)
    hash_ms = bench_hash.measure(400, 200, seed)["parse_and_hash_ms"]
    gc.collect()
    before_bytes = _resident_bytes()
    index = SessionIndex(capacity=sessions, ttl_s=1e9)
    for turn in range(1, _TURNS + 1):
        for number in range(sessions):
            chain, after = _chain(number, turn), None
            if turn > 1 and (hit := index.find(chain, 0.0)) is not None:
                after = hit.digest
            index.record(chain, _turn(number, source), 0.0, after)
    gc.collect()
    sessions_bytes = _resident_bytes() - before_bytes

    arrivals, forecast = ArrivalRate(), Forecast()
    for i in range(1000):
        arrivals.note(i * 0.01)
    forecast.learn_reply("t", None, 100)
    planners = {
        name: Planner(
            policy=TablePolicy(table, corrections),
            cluster=_Cluster(),
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=Backlog(),
        )
        for name, corrections in (
            ("decide_us", DEFAULT_CORRECTIONS),
            ("decide_table_only_us", frozenset[Correction]()),
            ("decide_all_corrections_us", frozenset(Correction)),
        )
    }
    queries = [
        Query("chat", _chain(source.randrange(sessions), _TURNS + 1), 0, "t", 200, Weights())
        for _ in range(rounds)
    ]
    workloads = [
        (
            source.uniform(0, 20_000),
            source.uniform(0, 4_000),
            source.uniform(0, 900),
            source.uniform(0, 5),
        )
        for _ in range(rounds)
    ]
    lookups = [_us(partial(table.find, *at)) for at in workloads]
    times: dict[str, list[float]] = {name: [] for name in planners}
    hits = 0
    in_turn = cycle(permutations(planners.items()))
    for query in queries:
        # Interleaved, and each as often first, when nothing of the conversation is in a cache.
        for name, planner in next(in_turn):
            times[name].append(_us(partial(planner.plan, query, 10.0)))
        hits += planners["decide_us"].plan(query, 10.0).hit is not None
    assert hits == rounds, "every query continues a known conversation"
    print(
        json.dumps(
            {
                "lookup_us_median": round(statistics.median(lookups), 2),
                "decide_us_median": round(statistics.median(times["decide_us"]), 2),
                "hash_400kb_ms": hash_ms,
                "sessions_bytes": sessions_bytes,
                "sessions": sessions,
                "bytes_per_session": round(sessions_bytes / sessions),
                **{f"{name}_p99": _p99(values) for name, values in times.items()},
                "decide_table_only_us_median": round(
                    statistics.median(times["decide_table_only_us"]), 2
                ),
                "decide_all_corrections_us_median": round(
                    statistics.median(times["decide_all_corrections_us"]), 2
                ),
                "rounds": rounds,
                **provenance(seed),
            }
        )
    )
    return 0


_TURNS = 3  # of each conversation: there is room for one each
_HOMES = [f"http://d{i}:30000#0" for i in range(8)]  # a name is one object in the router too


def _chain(number: int, turns: int) -> PrefixChain:
    """A conversation of that many turns; its first message is its own."""
    messages = [{"role": "system", "content": "You are helpful."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number} asks {turn}"})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": "An answer."})
    return hash_messages(b"salt", messages)


def _turn(number: int, source: random.Random) -> Turn:
    prompt = source.randrange(500, 20_000)
    return Turn(
        session=2**47 + number,
        number=1,
        home=_HOMES[number % 8],
        prompt_tokens=prompt,
        completion_tokens=source.randrange(10, 900),
        prefill_worker="http://p0:30000#0",
        prefill_tokens=prompt,
        usual_reply_tokens=100.0,
    )


def _us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _p99(values: list[float]) -> float:
    return round(statistics.quantiles(values, n=100)[98], 2)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
