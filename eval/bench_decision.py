"""``ppd-eval bench decision``: what one decision costs the router, at a million sessions."""

from __future__ import annotations

import gc
import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, permutations
from pathlib import Path

import msgspec

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.choice import ByLoad
from ppd.contract import Role
from ppd.decision_service import DecideRequest, HomeLoad, TurnSizes, decided, parse
from ppd.forecast import Forecast
from ppd.headroom import Headroom
from ppd.placement import Placement, WorkerView, place
from ppd.planning import Planner, Query
from ppd.prefix import PrefixChain, hash_messages
from ppd.score import Weights
from ppd.sessions import SessionIndex, Turn
from ppd.shared import SharedPrefixes
from ppd.table import Table
from ppd.table_policy import DEFAULT_CORRECTIONS, Correction, TablePolicy

from . import bench_hash
from .provenance import provenance


@dataclass(slots=True, eq=False)
class _Worker:
    """A ``ppd.placement.WorkerView`` that is always ready."""

    name: str
    role: Role
    identity: str
    takes_appends: bool = True
    page_size: int = 64
    running: int = 20
    in_flight: int = 0
    headroom: Headroom = field(default_factory=Headroom)

    def __post_init__(self) -> None:
        self.headroom.report(500_000)

    def has_room(self, tokens: int) -> bool:
        return True

    def evicted_tokens(self, session: int) -> int:
        return 0


class _Cluster:
    """Eight decode workers and two prefill workers; a ``ppd.placement.ClusterView``."""

    decode_workers = 8

    def __init__(self) -> None:
        self.workers = {
            role: [_Worker(url, role, f"{url}#0") for url in urls]
            for role, urls in ((Role.DECODE, _DECODE), (Role.PREFILL, _PREFILL))
        }

    def find(self, identity: str | None) -> _Worker | None:
        for workers in self.workers.values():
            for worker in workers:
                if worker.identity == identity:
                    return worker
        return None

    def ready(self, role: Role) -> list[_Worker]:
        return self.workers.get(role, [])

    def has(self, role: Role) -> bool:
        return role in self.workers

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        seed = None if root is None else int.from_bytes(root[:8])
        return place(self.ready(role), prefer, avoid, tokens, seed)

    def opening(self, root: bytes | None) -> None:
        return None


def run(table_file: Path, sessions: int, rounds: int, seed: int) -> int:
    """Print one JSON line. ``decide`` looks the conversation up, gathers features, decides."""
    table = Table.parse(table_file.read_bytes())
    source = random.Random(seed)
    hash_ms = bench_hash.measure(400, 200, seed)["parse_and_hash_ms"]
    gc.collect()
    before_bytes = _resident_bytes()
    cluster = _Cluster()
    homes = [worker.identity for worker in cluster.ready(Role.DECODE)]  # one object each
    index = SessionIndex(capacity=sessions, ttl_s=1e9)
    for turn in range(1, _TURNS + 1):
        for number in range(sessions):
            chain, after = _chain(number, turn), None
            if turn > 1 and (hit := index.find(chain, 0.0)) is not None:
                after = hit.digest
            index.record(chain, _turn(homes[number % 8], number, source), 0.0, after)
    gc.collect()
    sessions_bytes = _resident_bytes() - before_bytes

    arrivals, forecast = ArrivalRate(), Forecast()
    for i in range(1000):
        arrivals.note(i * 0.01)
    forecast.learn_reply("t", None, 100)
    backlog = Backlog()
    planners = {
        name: Planner(
            policy=TablePolicy(table, corrections),
            placement=Placement(cluster, decode_fallback=False, chooser=ByLoad(cluster, backlog)),
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
            shared=SharedPrefixes(),
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
            times[name].append(_us(partial(planner.plan, query, 1000, 10.0)))
        hits += planners["decide_us"].plan(query, 1000, 10.0).hit is not None
    assert hits == rounds, "every query continues a known conversation"
    service = _service(planners["decide_us"], workloads)
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
                **service,
                "rounds": rounds,
                **provenance(seed),
            }
        )
    )
    return 0


def _service(
    planner: Planner, workloads: Sequence[tuple[float, float, float, float]]
) -> dict[str, float]:
    """Measure ``POST /decide`` without HTTP: parse a body, decide, encode the answer."""
    whole, parsing, deciding = [], [], []
    for context, new, output, qps in workloads:
        sizes = TurnSizes(int(context), int(new), int(output))
        raw = msgspec.json.encode(DecideRequest(sizes, HomeLoad(page_size=64, running=3), qps=qps))
        request = parse(raw)
        decide = partial(decided, request, planner, "ppd", Weights(), 1.0)
        answer = decide()

        def serve(raw: bytes = raw) -> None:
            msgspec.json.encode(decided(parse(raw), planner, "ppd", Weights(), 1.0))

        whole.append(_us(serve))
        parsing.append(_us(partial(parse, raw)) + _us(partial(msgspec.json.encode, answer)))
        deciding.append(_us(decide))
    return {
        "service_us_median": round(statistics.median(whole), 2),
        "service_us_p99": _p99(whole),
        "service_json_us_median": round(statistics.median(parsing), 2),
        "service_decide_us_median": round(statistics.median(deciding), 2),
    }


_TURNS = 3  # of each conversation: there is room for one each
_DECODE = [f"http://d{i}:30000" for i in range(8)]
_PREFILL = [f"http://p{i}:30000" for i in range(2)]


def _chain(number: int, turns: int) -> PrefixChain:
    """A conversation of that many turns; its first message is its own."""
    messages = [{"role": "system", "content": "You are helpful."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number} asks {turn}"})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": "An answer."})
    return hash_messages(b"salt", messages)


def _turn(home: str, number: int, source: random.Random) -> Turn:
    prompt = source.randrange(500, 20_000)
    return Turn(
        session=2**47 + number,
        number=1,
        home=home,
        prompt_tokens=prompt,
        completion_tokens=source.randrange(10, 900),
        prefill_worker=f"{_PREFILL[0]}#0",
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
