"""The pool under bursts: measured, in simulated time, its control loop, and where it should run."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from ...pool.arrivals import BUDGET_S
from ..parts import Block, Table, block, short, spread
from ..ratios import HOW, compared, paired
from ..results import Results, Rows

_RATE = 4.0  # turns a second for each worker, that places of the search are compared at
_STAGES = ("prefill", "decode")
_NAMES = {  # in the order of the tables
    "ours": "ours",
    "prefill_first": "prefill first",
    "edf": "earliest deadline first",
    "fifo": "one after the other",
    "two_batchers": "two batchers",
    "fixed": "fixed batches",
    "ideal": "queueing alone",
    "ours_whole": "ours, no search divided",
}
_COSTS = {
    "expansion": "compiled: one expansion",
    "enter": "compiled: the begin of a search",
    "kept": "compiled: measuring a kept node again",
    "step": "Python: a step of ours",
    "search": "Python: a divided search of ours, besides its steps",
    "whole": "Python: a search of ours that is not divided, besides its step",
    "batch": "Python: a batch",
    "batched": "Python: a search of a batch",
    "alone": "Python: a whole search",
}
_OURS = "ours"
_WIDEST = 256  # nodes that a decode search keeps at most
_SHOWN = (0.3, 0.7)  # loads of the detailed tables, as of the measured bursts
_LATE = "late: the share that took longer than " + ", ".join(
    f"{1e3 * budget_s:g} ms ({stage})" for stage, budget_s in BUDGET_S.items()
)


def bursts(results: Results) -> Block:
    """Return p99 of both stages in bursts, by load, stage and way."""
    rows = results.rows("bench-pool.jsonl").where(what="bursts").newest()
    ways = _ways(rows)
    table = []
    for load in sorted(set(rows.values("load"))):
        for stage in _STAGES:
            of = {way: rows.where(load=load, stage=stage, way=way) for way in ways}
            for way in ways:
                ratio = compared(paired(of[_OURS], of[way], "p99_us", "round"))
                costs = of[way].values("scheduling_us")
                table.append(
                    (
                        f"{load:g}",
                        stage,
                        _NAMES[way],
                        spread([us / 1e3 for us in of[way].values("p99_us")]),
                        "1" if way == _OURS else ratio,
                        _late(of[way], "missed"),
                        "-" if way == "ideal" else spread(costs),
                        spread(of[way].values("choosing_us")),
                    )
                )
    head = ("load", "stage", "way", "p99, ms", "ours / it", "late", "scheduling, us", "choice, us")
    rounds = len(set(rows.values("round")))
    capacity = median(rows.values("capacity"))
    caption = (
        f"latency, {rounds} rounds: medians (lowest to highest); a load of 1 is "
        f"{capacity:,.0f} searches a second; {_LATE}; scheduling is a thread's processor time "
        "outside compiled code, for each search; choice: the part of it in which the order is "
        f"kept; ratios by round: {HOW}"
    )
    return block(Table(head, table, caption), made_of=[rows])


def _ways(rows: Rows) -> list[str]:
    found = set(rows.values("way"))
    return [way for way in _NAMES if way in found]


def _late(rows: Rows, field: str) -> str:
    shares = rows.values(field)
    return f"{median(shares):.1%}" if shares else "-"


def queueing(results: Results) -> Block:
    """Return the ways in simulated time, at the loads of the measured bursts."""
    rows = _simulated(results).where(python_share=1.0)
    table = []
    for load in _SHOWN:
        of = {way: rows.where(load=load, way=way) for way in _ways(rows)}
        for way, its in of.items():
            p99s = (short(_p99_ms(its, stage)) for stage in _STAGES)
            ratios = (
                compared(paired(of[_OURS], its, f"{stage}_p99_us", "seed")) for stage in _STAGES
            )
            table.append(
                (
                    f"{load:g}",
                    _NAMES[way],
                    *p99s,
                    *(("1", "1") if way == _OURS else ratios),
                    *(_late(its, f"{stage}_missed") for stage in _STAGES),
                    f"{median(its.values('scheduling_us')):.0f}",
                )
            )
    head = (
        "load",
        "way",
        "prefill, ms",
        "decode, ms",
        "ours / it, prefill",
        "ours / it, decode",
        "prefill late",
        "decode late",
        "Python, us",
    )
    caption = (
        f"latency p99 in simulated time, {_histories(rows)}; {_LATE}; Python: "
        f"for each search; ratios by history: {HOW}"
    )
    return block(Table(head, table, caption), made_of=[rows])


def loads(results: Results) -> Block:
    """Return the ways in simulated time at every load."""
    rows = _simulated(results).where(python_share=1.0)
    every = sorted(set(rows.values("load")))
    table = []
    for way in _ways(rows):
        of = [rows.where(load=load, way=way) for load in every]
        cells = (" / ".join(short(_p99_ms(its, stage)) for stage in _STAGES) for its in of)
        table.append((_NAMES[way], *cells))
    head = ("way", *(f"load {load:g}" for load in every))
    caption = f"latency p99 of prefill / decode in ms, simulated time, {_histories(rows)}"
    return block(Table(head, table, caption), made_of=[rows])


def python(results: Results) -> Block:
    """Return the ways in simulated time, with all, half and none of Python's time."""
    rows = _simulated(results)
    shares = sorted(set(rows.values("python_share")), reverse=True)
    table = []
    for load in _SHOWN:
        for way in _ways(rows):
            of = [rows.where(load=load, way=way, python_share=share) for share in shares]
            cells = (short(_p99_ms(its, stage)) for stage in _STAGES for its in of)
            table.append((f"{load:g}", _NAMES[way], *cells))
    columns = (f"{stage}, {share:.0%}" for stage in _STAGES for share in shares)
    caption = (
        f"latency p99 in ms by the share of Python's time that is left, simulated time, "
        f"{_histories(rows)}"
    )
    return block(Table(("load", "way", *columns), table, caption), made_of=[rows])


def costs(results: Results) -> Block:
    """Return the costs that the simulated bursts assume."""
    rows = _simulated(results).where(python_share=1.0)
    row = rows.rows[-1]
    table = [(text, f"{1e6 * row[name]:g}") for name, text in _COSTS.items()]
    beside = "compiled: one expansion, beside other searches of the call"
    table.insert(1, (beside, f"{1e6 * row['expansion'] * row['together']:g}"))
    return block(Table(("what takes a core's time", "us"), table), made_of=[rows])


def wide(results: Results) -> Block:
    """Return the ways in simulated time by the width of decode's searches."""
    rows = results.rows("pool-queueing.jsonl").newest().where(python_share=1.0)
    load = max(row["load"] for row in rows if row["wider"] > 1)
    table = []
    for (wider,), of in sorted(rows.where(load=load).groups("wider").items()):
        for way in _ways(of):
            its, plain = of.where(way=way), of.where(way=_OURS)
            cells = (short(_p99_ms(its, stage)) for stage in _STAGES)
            ratios = (compared(paired(plain, its, f"{stage}_p99_us", "seed")) for stage in _STAGES)
            name, width = _NAMES[way], f"{_WIDEST * wider:,}"
            table.append((width, name, *cells, *(("1", "1") if way == _OURS else ratios)))
    ways = ("prefill, ms", "decode, ms", "ours / it, prefill", "ours / it, decode")
    caption = (
        f"latency p99 at load {load:g} by itopk of the widest decode search, simulated time, "
        f"{_histories(rows)}; ratios by history: {HOW}"
    )
    return block(Table(("itopk", "way", *ways), table, caption), made_of=[rows])


def _simulated(results: Results) -> Rows:
    return results.rows("pool-queueing.jsonl").newest().where(wider=1)


def _histories(rows: Rows) -> str:
    count = len(set(rows.values("seed")))
    return "one history" if count == 1 else f"medians of {count} histories"


def _p99_ms(rows: Rows, stage: str) -> float:
    return float(median(rows.values(f"{stage}_p99_us"))) / 1e3


def control(results: Results) -> Block:
    """Return both stages' latency by load in simulated time, with the loop and without."""
    rows = results.rows("pool-control.jsonl").where(measured=False).newest()
    return _control(rows, "in simulated time")


def control_measured(results: Results) -> Block:
    """Return both stages' latency by load over an index, with the loop and without."""
    rows = results.rows("pool-control.jsonl").where(measured=True).newest()
    return _control(rows, f"over {median(rows.values('n')):,.0f} rows")


def _control(rows: Rows, where: str) -> Block:
    table = []
    for (phase,), of_phase in rows.groups("phase").items():
        for (way,), of in of_phase.groups("way").items():
            fields = (*(f"{stage}_p95_ms" for stage in _STAGES), "kv_there_p95_ms")
            p95s = (short(median(of.values(field))) for field in fields)
            late = f"{100 * median(of.values('decode_late')):.1f} %"
            name = way.replace("learned", "inferred")  # of older rows
            table.append((phase, name, f"{median(of.values('reserved')):.2f}", *p95s, late))
    head = ("load", "reserved share", "on average", "prefill, ms", "decode, ms", "KV there, ms")
    caption = (
        f"latency p95 of searches {where}, {_histories(rows)}; KV "
        "there: the time until a prefill's search and its transfer are finished; decode late: "
        f"longer than {median(rows.values('late_ms')):g} ms"
    )
    return block(Table((*head, "decode late"), table, caption), made_of=[rows])


def placement(results: Results) -> Block:
    """Return where vector search may run in a cluster of GPUs, simulated."""
    rows = results.rows("search-placement.jsonl").where(row="searches")
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        workers = sum(row["workers"].values())
        groups.setdefault((row["profile"], workers, row["where"]), []).append(row)
    table = []
    for (profile, workers, where), found in groups.items():
        at = min(found, key=lambda row: abs(row["per_s_a_worker"] - _RATE))
        table.append(
            (
                f"`{profile}`",
                f"{workers}",
                where,
                f"{max(row['per_s_a_worker'] for row in found):g}",
                _p50_p99(at, "ttft"),
                _p50_p99(at, "tpot"),
                _p50_p99(at, "prefill_search"),
                _p50_p99(at, "decode_search"),
                f"{at['kv_tokens']:,}",
            )
        )
    head = ("profile", "workers", "search runs on", "turns/s a worker, at most")
    times = ("TTFT, ms", "TPOT, ms", "prefill's search, ms", "decode's search, ms")
    caption = f"p50 / p99 at {_RATE:g} turns a second for each worker"
    return block(
        Table((*head, *times, "KV tokens of a decode worker"), table, caption), made_of=[rows]
    )


def _p50_p99(row: Mapping[str, Any], name: str) -> str:
    return f"{short(row[f'{name}_p50_ms'])} / {short(row[f'{name}_p99_ms'])}"


BLOCKS = {
    "pool-bursts": bursts,
    "pool-queueing": queueing,
    "pool-queueing-costs": costs,
    "pool-queueing-loads": loads,
    "pool-queueing-python": python,
    "pool-queueing-wide": wide,
    "pool-control": control,
    "pool-control-measured": control_measured,
    "search-placement": placement,
}
