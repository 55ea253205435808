"""Failures: the fault table, the load test of the router, and clients that others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..parts import Block, Table, block
from ..results import Results, Row, Rows

_ROUTERS = (("smg", "SMG"), ("sglang_router", "sglang-router"), ("mini_lb", "mini_lb"))
_OURS = ("ours, remote", "ours, local")
_TROUBLES = ("kill", "stop", "flap", "drain")
_OUTCOMES = ("ok", "disconnected", "rejected", "worker_error", "truncated")
_LOADS = ("load-router.jsonl", "load-router-house.jsonl")


def fault_table(results: Results) -> Block:
    """Return what each router does in each fault; what is wrong stands in bold."""
    files = [results.rows(name) for name in ("fault-table.jsonl", "fault-table-house.jsonl")]
    newest: dict[tuple[str, str], tuple[Rows, Row]] = {}
    for rows in files:
        for row in rows:
            key = row["fault"], row["router"]
            if key not in newest or newest[key][1]["at"] <= row["at"]:
                newest[key] = rows, row
    table = []
    for fault in dict.fromkeys(fault for fault, _ in newest):
        seen = {router: row for (name, router), (_, row) in newest.items() if name == fault}
        others = (_cell(seen[router]) if router in seen else "-" for router, _ in _ROUTERS)
        table.append((fault, _both(*(seen.get(name) for name in _OURS)), *others))
    made_of = [
        Rows(rows.file, tuple(row for of, row in newest.values() if of is rows), rows.headers)
        for rows in files
    ]
    head = ("", "ours", *(name for _, name in _ROUTERS))
    return block(Table(head, table), made_of=[rows for rows in made_of if rows.rows])


def _cell(row: Row) -> str:
    return row["seen"] if row["right"] else f"**{row['seen']}**"


def _both(remote: Row | None, local: Row | None) -> str:
    cells = {
        name: _cell(row) for name, row in (("remote", remote), ("local", local)) if row is not None
    }
    if len(set(cells.values())) == 1:
        return next(iter(cells.values()))
    return "; ".join(f"{name}: {cell}" for name, cell in cells.items())


def load(results: Results) -> Block:
    """Return every load test of the router: what happened, and whether the counts agree."""
    files = [results.rows(name).where(part="summary") for name in _LOADS]
    runs = sorted((row for rows in files for row in rows), key=lambda row: row["at"], reverse=True)
    lines: dict[str, list[str]] = {}
    for row in runs:
        for name, text in _load_cells(row).items():
            lines.setdefault(name, []).append(text)
    head = ("commit", *(row["commit"][:7] for row in runs))
    return block(Table(head, [(name, *cells) for name, cells in lines.items()]), made_of=files)


def _load_cells(row: Row) -> Mapping[str, str]:
    differences = len(row["differences"])
    memory = row["rss_mb"]
    troubles, outcomes = row["troubles"], row["outcomes"]
    return {
        "requests": f"{row['requests']:,}",
        "seconds": f"{row['seconds']:.0f}",
        "seed": f"{row['seed']}",
        **{f"workers: {name}": f"{troubles.get(name, 0):,}" for name in _TROUBLES},
        **{f"outcome `{name}`": f"{outcomes.get(name, 0):,}" for name in _OUTCOMES},
        "streams that went on elsewhere": f"{row['streams_resumed']:,}",
        "counts of `/metrics` that differ from the clients'": f"{differences or 'none'}",
        "requests that may be counted in two ways": f"{row['counted_otherwise']}",
        "errors after a fault of a worker": f"{sum(row['errors_explained'].values()):,}",
        "errors without a cause": f"{row['unexplained']}",
        "in flight, reserved tokens at the end": f"{row['in_flight']}, {row['backlog_tokens']}",
        "descriptors: start, end": ", ".join(map(str, row["descriptors"])),
        "memory at 0, 25, 50, 75, 100 %, MB": ", ".join(
            f"{memory[at]:.0f}" for at in sorted(memory, key=float)
        ),
    }


def clients(results: Results) -> Block:
    """Return what clients of others sent, and what the router counted."""
    rows = results.rows("clients.jsonl").newest()
    counted: Mapping[str, Mapping[str, Any]] = rows.rows[-1]["clients"]
    keys = ("requests", "ok", "remote", "local")
    table = [(f"`{name}`", *(f"{of[key]}" for key in keys)) for name, of in counted.items()]
    return block(Table(("client", *keys), table), made_of=[rows])


BLOCKS = {"fault-table": fault_table, "load-router": load, "clients": clients}
