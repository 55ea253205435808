"""The pool under bursts: measured, in simulated time, its control loop, and where it should run."""

from __future__ import annotations

from statistics import median

from ppd.ann.control import Aims

from ..parts import Block, Table, block, short, spread
from ..ratios import HOW, compared, paired
from ..results import Results, Rows

_RATE = 5.0  # turns a second for each GPU, that places of the search are compared at
_STAGES = ("prefill", "decode")
_NAMES = {
    "ours": "ours",
    "fifo": "one after the other",
    "fixed": "fixed batches",
    "ideal": "queueing alone",
    "prefill_first": "prefill first, whole searches",
}
_PLAIN = "prefill_first"


def bursts(results: Results) -> Block:
    """Return p99 of both stages in bursts, by load and way."""
    rows = results.rows("bench-pool.jsonl").where(what="bursts").newest()
    ways = [way for way in dict.fromkeys(rows.values("way")) if way != "ideal"] + ["ideal"]
    others = [way for way in ways if way not in ("ours", "ideal")]
    table = []
    for load in sorted(set(rows.values("load"))):
        for stage in _STAGES:
            of = {way: rows.where(load=load, stage=stage, way=way) for way in ways}
            cells = (spread(_ms(of[way])) for way in ways)
            ratios = (compared(paired(of["ours"], of[way], "p99_us", "round")) for way in others)
            table.append((f"{load:g}", stage, *cells, *ratios))
    named = [_NAMES.get(way, way) for way in ways]
    head = ("load", "stage", *named, *(f"ours / {_NAMES.get(way, way)}" for way in others))
    rounds = len(set(rows.values("round")))
    capacity = median(rows.values("capacity"))
    caption = (
        f"latency p99 in ms, {rounds} rounds: medians (lowest to highest); a load of 1 is "
        f"{capacity:,.0f} searches a second; ratios by round: {HOW}"
    )
    made = block(Table(head, table, caption), made_of=[rows])
    if _PLAIN in ways:
        return made
    missing = (
        "Not measured yet: a loop that runs whole searches, those of prefill first. Without that "
        "comparison\nthe table does not show how much of the gain comes from continuous batching."
    )
    return Block(f"{made.text}\n\n{missing}", made.made_of)


def _ms(rows: Rows) -> list[float]:
    return [us / 1e3 for us in rows.values("p99_us")]


def queueing(results: Results) -> Block:
    """Return the same ways in simulated time, with all, half and none of Python's time."""
    rows = results.rows("pool-queueing.jsonl").newest()
    ways = list(dict.fromkeys(rows.values("way")))
    table = []
    for load in sorted(set(rows.values("load"))):
        for stage in _STAGES:
            of = {way: rows.where(load=load, way=way).values(f"{stage}_p99_us") for way in ways}
            cells = (short(median(of[way]) / 1e3) for way in ways)
            table.append((f"{load:g}", stage, *cells))
    named = (way.replace("_", " ") for way in ways)
    seeds = len(set(rows.values("seed")))
    caption = f"latency p99 in ms, simulated time, medians of {seeds} histories"
    return block(Table(("load", "stage", *named), table, caption), made_of=[rows])


def control(results: Results) -> Block:
    """Return how often the aims were missed, with the control loop and with fixed controls."""
    rows, aims = results.rows("pool-control.jsonl").newest(), Aims()
    table = []
    for (way,), of in rows.groups("way").items():
        waits = sum(wait > aims.prefill_wait_p95_ms for wait in of.values("prefill_p95_ms"))
        stalls = sum(stall > aims.decode_stall for stall in of.values("decode_stall"))
        table.append((way, f"{len(of)}", f"{waits}", f"{stalls}"))
    head = ("controls", "intervals", "prefill's p95 above its aim", "decode's stall above its aim")
    return block(Table(head, table, "simulated time, one seed"), made_of=[rows])


def placement(results: Results) -> Block:
    """Return where vector search may run in a cluster of GPUs, by the cost model."""
    rows = results.rows("search-placement.jsonl").newest()
    sized: dict[tuple[int, str], list[dict[str, float]]] = {}
    for row in rows:
        gpus = sum(row["gpus"].values())
        line = {**row, "rate": row["turns_per_s"] / gpus}
        sized.setdefault((gpus, row["where"]), []).append(line)
    table = []
    for (gpus, where), lines in sorted(sized.items(), reverse=True):
        at = min(lines, key=lambda line: abs(line["rate"] - _RATE))
        table.append(
            (
                f"{gpus}",
                where,
                f"{max(line['rate'] for line in lines):.1f}",
                *(short(at[key]) for key in ("ttft_ms", "prefill_search_ms", "decode_search_ms")),
                f"{at['kv_tokens']:,}",
            )
        )
    head = ("GPUs", "search runs on", "turns/s a GPU, at most", "TTFT, ms", "prefill's search, ms")
    caption = f"TTFT and searches at {_RATE:g} turns a second for each GPU"
    return block(
        Table((*head, "decode's search, ms", "KV tokens of a decode GPU"), table, caption),
        made_of=[rows],
    )


BLOCKS = {
    "pool-bursts": bursts,
    "pool-queueing": queueing,
    "pool-control": control,
    "search-placement": placement,
}
