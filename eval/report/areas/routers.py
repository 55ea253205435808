"""What a router costs: from ``bench-router`` rows."""

from __future__ import annotations

from collections.abc import Sequence

from ppd.errors import ConfigError

from ...routers.summary import round_ratio
from ..parts import Block, Table, block, short, spread
from ..ratios import HOW, compared
from ..results import Results, Row, Rows, commit_of

_FILE = "bench-router.jsonl"
_NAMES = {
    "ours": "ours",
    "ours_compiled": "ours, compiled",
    "ours_everything": "ours, everything",
    "ours_2_processes": "ours, 2 processes",
    "ours_4_processes": "ours, 4 processes",
    "smg": "SMG (Rust)",
    "sglang_router": "sglang-router (Rust)",
    "mini_lb": "mini_lb (Python)",
    "floor": "floor: uvloop",
    "floor_two_legs": "floor: uvloop, both legs",
    "floor_kernel": "floor: C",
    "floor_uring": "floor: C, io_uring",
}
_RIVAL, _USUAL = "smg", "ours_compiled"  # the build that most people get
_REQUEST, _BURST, _PACED = (f"cpu_us_per_{x}" for x in ("request", "chunk_burst", "chunk_paced"))
_TTFT, _TTFT_P99, _MEMORY = "added_ttft_p50_ms", "added_ttft_p99_ms", "mb_per_1000_streams"
_CPU_OF_REQUESTS = (
    (_REQUEST, "request"),
    ("cpu_us_per_local_turn", "local turn"),
    ("cpu_us_per_long_request", "400 kB request"),
)
_CPU_OF_CHUNKS = (
    (_BURST, "burst"),
    ("cpu_us_per_chunk_saturated", "saturated"),
    (f"{_PACED}_1", "1 stream"),
    (f"{_PACED}_64", "64"),
    (_PACED, "512"),
    ("cpu_us_per_chunk_open_4096", "4,096"),
)
_BESIDE = (
    (_TTFT, "added TTFT p50, ms"),
    (_TTFT_P99, "p99, ms"),
    (_MEMORY, "MB for 1,000 open streams"),
)
_STREAMS = (
    ("pace_paced", "pace achieved"),
    ("reads_per_chunk_paced", "reads a chunk"),
    ("slip_p99_ms_paced", "worker's slip p99, ms"),
    ("fairness_paced", "least share of processes"),
)
_LATENCY = (
    ("ttft_p50_ms_paced", "TTFT p50, ms"),
    ("ttft_p99_ms_paced", "p99"),
    ("itl_p50_ms_paced", "ITL p50, ms"),
    ("itl_p99_ms_paced", "p99"),
)
_SATURATED = (
    ("chunks_per_s_saturated", "chunks/s"),
    ("core_use_saturated", "of the core"),
    ("chunks_per_s_one_core", "chunks/s of a core"),
)
_SATURATED_LATENCY = (
    ("reads_per_chunk_saturated", "reads a chunk"),
    ("ttft_p99_ms_saturated", "TTFT p99, ms"),
    ("itl_p99_ms_saturated", "ITL p99, ms"),
)
_CLOSED_LOOP = (
    ("requests_per_s", "requests/s"),
    ("core_use_requests", "of the core"),
    ("requests_per_s_one_core", "requests/s of a core"),
    ("request_p99_ms", "p99, ms"),
)


def runs_of(rows: Rows) -> list[Rows]:
    """Return the runs of a file: in each a router has one row for each round."""
    found: list[list[Row]] = []
    last: tuple[str, str | None] | None = None
    seen: set[tuple[str, int]] = set()
    for row in rows:
        of = commit_of(row), row.get("baseline_commit")
        key = row["router"], row["round"]
        if of != last or key in seen:
            found.append([])
            last, seen = of, set()
        seen.add(key)
        found[-1].append(row)
    return [Rows(rows.file, tuple(run), rows.headers) for run in found]


def _newest_run(results: Results, *routers: str) -> Rows:
    """Return the newest run that has all of some routers."""
    for run in reversed(runs_of(results.rows(_FILE))):
        if set(routers) <= set(run.values("router")):
            return run
    raise ConfigError(f"{_FILE}: no run has {', '.join(routers)}")


def _cost(run: Rows, router: str, metric: str) -> str:
    """Return a router's median with its spread; - where it was not measured."""
    values = [row[metric] for row in run.where(router=router) if metric in row]
    return spread(values) if values else "-"


def _table(run: Rows, columns: Sequence[tuple[str, str]], caption: str) -> Table:
    """Return a row for each router, and a column for each metric that the run has."""
    has = [(metric, title) for metric, title in columns if any(metric in row for row in run)]
    routers = [name for name in _NAMES if name in run.values("router")]
    cells = [(_NAMES[name], *(_cost(run, name, metric) for metric, _ in has)) for name in routers]
    return Table(("", *(title for _, title in has)), cells, caption)


def ratios(runs: Sequence[Rows], one: str, other: str, metric: str) -> list[float]:
    """Divide one router's costs by another's in the same round."""
    found: list[float] = []
    for run in runs:
        rows = {(row["router"], row["round"]): row for row in run}
        for (router, number), row in rows.items():
            beside = rows.get((other, number))
            if router == one and beside is not None:
                ratio = round_ratio(row, beside, metric)
                found += [] if ratio is None else [ratio]
    return found


def costs(results: Results) -> Block:
    """Return what each router costs, of the newest run that has all of them."""
    run = _newest_run(results, "ours", _RIVAL, "sglang_router", "mini_lb")
    rounds = len(run.where(router="ours"))
    tables = [
        _table(
            run, _CPU_OF_REQUESTS, f"CPU time in us; medians of {rounds} rounds (lowest to highest)"
        ),
        _table(run, _CPU_OF_CHUNKS, "CPU time of a chunk in us"),
        _table(run, _BESIDE, "latency and memory of the same rounds"),
        _table(run, _STREAMS, "512 streams, each of a chunk every 20 ms"),
        _table(run, _LATENCY, "latency of these streams"),
        _table(run, _SATURATED, "chunks, as fast as workers, router and clients can"),
        _table(run, _SATURATED_LATENCY, "reads and latency of these chunks"),
        _table(run, _CLOSED_LOOP, "requests of 32 connections, as fast as they can"),
    ]
    return block(*(table for table in tables if len(table.head) > 1), made_of=[run])


def against_rival(results: Results) -> Block:
    """Return our builds against SMG, paired by round, on every commit that both were run on."""
    runs = [run for run in runs_of(results.rows(_FILE)) if _RIVAL in run.values("router")]
    metrics = (_REQUEST, _BURST, _PACED, _TTFT)
    table = []
    for commit in dict.fromkeys(commit_of(run.rows[0]) for run in reversed(runs)):
        of = [run for run in runs if commit_of(run.rows[0]) == commit]
        for build in ("ours", "ours_compiled", "ours_everything"):
            if found := ratios(of, build, _RIVAL, _REQUEST):
                values = (compared(ratios(of, build, _RIVAL, metric)) for metric in metrics)
                table.append((commit[:7], _NAMES[build], f"{len(found)}", *values))
    head = (
        "commit",
        "build",
        "rounds",
        "request",
        "chunk, burst",
        "chunk, 512 streams",
        "TTFT p50",
    )
    caption = f"multiples of SMG in the same round, newest commit first: {HOW}"
    return block(Table(head, table, caption), made_of=runs)


def summary(results: Results) -> Block:
    """Return our compiled router's costs beside SMG's, of the newest run that has both."""
    run = _newest_run(results, _USUAL, "ours", _RIVAL)
    metrics = (
        (_REQUEST, "CPU time of a request, us"),
        (_PACED, "CPU time of a chunk, 512 streams, us"),
        (_MEMORY, "memory of 1,000 open streams, MB"),
        (_TTFT, "added TTFT p50, ms"),
        (_TTFT_P99, "added TTFT p99, ms"),
    )
    table = []
    for metric, title in metrics:
        sides = (_cost(run, router, metric) for router in (_USUAL, "ours", _RIVAL))
        table.append((title, *sides, compared(ratios([run], _USUAL, _RIVAL, metric))))
    head = ("", "compiled", "pure Python", "SMG", "compiled / SMG")
    rounds = len(run.where(router=_USUAL))
    caption = (
        f"SMG is SGLang's router in Rust; medians of {rounds} rounds (lowest to highest); "
        f"ratios by round: {HOW}"
    )
    return block(Table(head, table, caption), made_of=[run])


def floors(results: Results) -> Block:
    """Return what a chunk costs programs that only copy bytes."""
    run = _newest_run(results, "floor_uring", "floor_kernel", "ours", _RIVAL)
    table = []
    for router in (name for name in _NAMES if name in run.values("router")):
        cells = [_NAMES[router]]
        for metric in (_BURST, _PACED):
            of_rival = "1" if router == _RIVAL else compared(ratios([run], router, _RIVAL, metric))
            cells += [_cost(run, router, metric), of_rival]
        table.append(tuple(cells))
    rounds = len(run.where(router="ours"))
    head = ("", "chunk, burst, us", "of SMG's", "chunk, 512 streams, us", "of SMG's")
    caption = f"{rounds} rounds: medians (lowest to highest); ratios by round: {HOW}"
    return block(Table(head, table, caption), made_of=[run])


def against_baseline(results: Results) -> Block:
    """Return our router against an earlier commit of itself, round by round."""
    table, used = [], []
    by_commit: dict[tuple[str, str], list[Rows]] = {}
    for run in runs_of(results.rows("bench-router-house.jsonl")):
        key = commit_of(run.rows[0]), str(run.rows[0]["baseline_commit"])
        by_commit.setdefault(key, []).append(run)
    for (commit, base), runs in reversed(by_commit.items()):
        used += runs
        for build, other in (("ours", "baseline"), ("ours_compiled", "baseline_compiled")):
            if pairs := ratios(runs, build, other, _REQUEST):
                values = (
                    compared(ratios(runs, build, other, m)) for m in (_REQUEST, _PACED, _BURST)
                )
                name = "pure" if build == "ours" else "compiled"
                table.append((commit[:7], base[:7], name, f"{len(pairs)}", *values))
    head = ("commit", "against", "build", "rounds", "request", "chunk, 512 streams", "chunk, burst")
    caption = f"multiples of the earlier commit's CPU time: {HOW}"
    return block(Table(head, table, caption), made_of=used)


def everything(results: Results) -> Block:
    """Return our router with all parts on against the same with its defaults, newest run first."""
    runs = runs_of(results.rows("bench-router-everything.jsonl"))[::-1]
    table = []
    for run in runs:
        pairs = ratios([run], "ours_everything", "ours", _REQUEST)
        costs = (_cost(run, router, _REQUEST) for router in ("ours", "ours_everything"))
        earlier = compared(ratios([run], "ours", "baseline", _REQUEST))
        table.append(
            (commit_of(run.rows[0])[:7], f"{len(pairs)}", *costs, compared(pairs), earlier)
        )
    head = ("commit", "rounds", "defaults, us", "everything, us", "ratio", "defaults, new to old")
    caption = f"CPU time of a request; medians of rounds (lowest to highest); ratios: {HOW}"
    return block(Table(head, table, caption), made_of=runs)


def stages(results: Results) -> Block:
    """Return on what a request's time in our router is spent."""
    rows = results.rows("router-stages.jsonl").newest()
    row = rows.rows[-1]
    kinds = {"first": "first turn, two legs", "local": "local turn, one leg"}
    table = [
        (stage, *(f"{100 * row[kind][stage]:.0f} %" for kind in kinds)) for stage in row["first"]
    ]
    rest = (f"{100 * (1 - sum(row[kind].values())):.0f} %" for kind in kinds)
    table.append(("between these, and timers", *rest))
    caption = "shares of the router's time outside of the event loop, under Python's profiler"
    return block(Table(("stage", *kinds.values()), table, caption), made_of=[rows])


def decision_cost(results: Results) -> Block:
    """Return what one decision costs, of the newest row."""
    rows = results.rows("bench-decision.jsonl").newest()
    row = rows.rows[-1]
    cells = (
        f"{row['sessions']:,}",
        short(row["lookup_us_median"]),
        short(row["decide_us_median"]),
        short(row["decide_us_p99"]),
        f"{row['bytes_per_session']:,}",
    )
    head = ("sessions", "look-up p50, us", "decision p50, us", "p99, us", "bytes a session")
    tables = [Table(head, [cells])]
    if "service_us_median" in row:
        names = ("service_us_median", "service_us_p99", "service_decide_us_median")
        served = (*(short(row[name]) for name in names), short(row["service_json_us_median"]))
        heads = ("p50, us", "p99, us", "of it the decision, p50", "JSON, p50")
        tables.append(Table(heads, [served], "`POST /decide`, without HTTP"))
    return block(*tables, made_of=[rows])


def _session_bytes(results: Results) -> str:
    return f"{results.rows('bench-decision.jsonl').newest().rows[-1]['bytes_per_session']:,}"


NUMBERS = {"session-bytes": _session_bytes}
BLOCKS = {
    "router-costs": costs,
    "router-against-smg": against_rival,
    "router-summary": summary,
    "router-floors": floors,
    "router-baseline": against_baseline,
    "router-everything": everything,
    "router-stages": stages,
    "decision-cost": decision_cost,
}
