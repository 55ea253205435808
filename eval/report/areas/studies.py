"""Simulated clusters that four GPUs cannot show: size, pauses, a trace, the cheapest cluster."""

from __future__ import annotations

from statistics import median

from ..parts import PAPER_MACHINE, Block, Table, block, percent, short
from ..results import Results, Row, Rows

_FILE = "simulate-study.jsonl"
_TRACE_QPS = 0.1  # turns a second of a worker: the trace's rate is below that of every mix


def _studies(results: Results) -> Rows:
    """Return what was run by itself: a plan's tries tell how many turns meet its targets."""
    return results.rows(_FILE).where(row="study", ok_share=None).newest()


def _line(row: Row) -> tuple[str, ...]:
    return (
        row["shape"],
        f"{row['turns']:,}",
        short(row["t1_ttft_p50_ms"]),
        f"{short(row['t2_ttft_p50_ms'])} / {short(row['t2_ttft_p99_ms'])}",
        f"{short(row['tpot_p50_ms'])} / {short(row['tpot_p99_ms'])}",
    )


_HEAD = ("cluster", "turns", "T1 TTFT p50, ms", "T2 TTFT p50 / p99, ms", "TPOT p50 / p99, ms")


def mix(results: Results) -> Block:
    """Return the paper's workloads in one mix, on small and on large clusters."""
    rows = _studies(results).pick(
        lambda row: row["think_s"] is None and row["qps"] > _TRACE_QPS, "a mix of workloads"
    )
    table = [
        (*_line(row), f"{row['gpu_s_per_mtoken']:,.0f}", f"{row['event_s']:.1f}") for row in rows
    ]
    head = (*_HEAD, "GPU s a million tokens", "simulated in, s")
    return block(Table(head, table, PAPER_MACHINE), made_of=[rows])


def pauses(results: Results) -> Block:
    """Return what is lost of the KV while conversations pause."""
    rows = _studies(results).pick(lambda row: row["think_s"] is not None, "a pause")
    thinks = sorted(set(rows.values("think_s")))
    of = {(row["shape"], row["think_s"]): row for row in rows}
    table = [
        (shape, *(_pause(of[shape, think]) for think in thinks))
        for shape in dict.fromkeys(rows.values("shape"))
    ]
    caption = (
        "later turns that find nothing cached, and T2 TTFT p50 in ms, by mean pause; "
        f"{PAPER_MACHINE}"
    )
    return block(
        Table(("cluster", *(f"{think:g} s" for think in thinks)), table, caption), made_of=[rows]
    )


def _pause(row: Row) -> str:
    return f"{percent(row['lost_share'])}, {short(row['t2_ttft_p50_ms'])}"


def trace(results: Results) -> Block:
    """Return a public chat trace, and many copies of it."""
    rows = _studies(results).pick(
        lambda row: row["think_s"] is None and row["qps"] <= _TRACE_QPS, "a trace"
    )
    table = [(*_line(row), percent(row["lost_share"])) for row in rows]
    return block(Table((*_HEAD, "found nothing"), table, PAPER_MACHINE), made_of=[rows])


def ranks(results: Results) -> Block:
    """Return decode servers of one rank each, and one whose ranks step together."""
    rows = results.rows("simulate-ranks.jsonl").newest()
    of: dict[tuple[str, str], list[list[Row]]] = {}
    for (shape, policy, _), rate in rows.groups("shape", "policy", "seed").items():
        of.setdefault((shape, policy), []).append(sorted(rate, key=lambda row: row["qps"]))
    table = []
    for (shape, policy), seeds in of.items():
        for at_rate in zip(*seeds, strict=True):
            measures = ("qps", "t2_ttft_p50_ms", "t2_ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
            medians = (short(median(row[key] for row in at_rate)) for key in measures)
            table.append((shape, policy, *medians))
    head = (
        "cluster",
        "policy",
        "turns/s of a worker",
        "T2 TTFT p50, ms",
        "p99",
        "TPOT p50, ms",
        "p99",
    )
    return block(Table(head, table, f"medians of {len(seeds)} seeds"), made_of=[rows])


def plan(results: Results) -> Block:
    """Return the cheapest cluster that meets its targets, by rate."""
    rows = results.rows(_FILE).where(row="plan")
    table = []
    for row in sorted(rows, key=lambda row: row["qps"]):
        best = row["best"]
        table.append(
            (
                f"{row['qps']:g}",
                best["shape"],
                f"{row['tried']}",
                f"{100 * best['ok_share']:.1f} %",
                *(short(best[key]) for key in ("t2_ttft_p50_ms", "t2_ttft_p99_ms")),
                *(short(best[key]) for key in ("tpot_p50_ms", "tpot_p99_ms")),
                f"{best['gpu_s_per_mtoken']:,.0f}",
            )
        )
    targets = rows.rows[-1]["targets"]
    head: tuple[str, ...] = (
        "conversations/s",
        "cheapest",
        "tried",
        "turns in time",
        "T2 TTFT p50, ms",
        "p99",
    )
    head += ("TPOT p50, ms", "p99", "GPU s a million tokens")
    caption = (
        f"targets: TTFT {targets['ttft_ms']:g} ms, TPOT {targets['tpot_ms']:g} ms, met by "
        f"{percent(rows.rows[-1]['share'])} of the turns; {PAPER_MACHINE}"
    )
    return block(Table(head, table, caption), made_of=[rows])


def host(results: Results) -> Block:
    """Return what KV on the host brings back, over a trace with pauses."""
    rows = results.rows("simulate-host.jsonl").where(row="study").newest()
    table = [
        (
            f"`{row['profile']}`",
            f"`{row['policy']}`",
            f"{row.get('host_gb', 0):g}",
            percent(row["lost_share"]),
            short(row["t1_ttft_p50_ms"]),
            f"{short(row['t2_ttft_p50_ms'])} / {short(row['t2_ttft_p99_ms'])}",
            f"{short(row['tpot_p50_ms'])} / {short(row['tpot_p99_ms'])}",
            f"{row['moved_tokens_per_turn']:,.0f}",
        )
        for row in sorted(rows, key=lambda row: (row["profile"], row["policy"]), reverse=True)
    ]
    row = rows.rows[0]
    caption = (
        f"`{row['shape']}`, {row['turns']:,} turns, {row['link_gbps']:g} Gb/s between workers; "
        "later turns that found too little KV"
    )
    head = ("profile", "policy", "GB of a host", "found too little", *_HEAD[2:])
    return block(Table((*head, "KV moved a turn, tokens"), table, caption), made_of=[rows])


BLOCKS = {
    "sim-host": host,
    "sim-mix": mix,
    "sim-pauses": pauses,
    "sim-trace": trace,
    "sim-plan": plan,
    "sim-ranks": ranks,
}
