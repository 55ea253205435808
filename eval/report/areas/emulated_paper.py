"""Points of the PPD paper with four workers: its authors' measurement, simulation, emulation."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...simulation.paper_points import EMULATED
from ..parts import Block, Table, block, short
from ..results import Results
from .emulation import METRICS

_FILE = "emulation-paper-simulator.jsonl"


def points(results: Results) -> Block:
    """Return the medians of each point: as its authors measured it, simulated, and emulated."""
    rows = results.rows(_FILE)
    measured = {(point.configuration, point.metric): point.value for point in EMULATED}
    table = []
    for shape, policy in dict.fromkeys((row["shape"], row["policy"]) for row in rows):
        own = rows.where(shape=shape, policy=policy)
        name = configuration(shape, policy)
        cells = []
        for metric in METRICS:
            (row,) = own.where(metric=metric)
            theirs = measured.get((name, metric))
            told = "-" if theirs is None else short(theirs)
            cells.append(f"{told} / {short(row['simulated'])} / {short(row['emulated'])}")
        table.append((f"`{name}`", *cells))
    (workload,) = set(rows.values("workload"))
    row = rows.rows[0]
    caption = (
        f"medians, ms: measured by the authors / simulated / emulated; `{workload}`, "
        f"{row['conversations']} conversations at {row['qps']:g}/s; profile {row['profile']}, "
        f"k = {', '.join(f'{k:g}' for k in dict.fromkeys(rows.values('slow_motion')))}, "
        f"{row['link_gbps']:g} Gb/s"
    )
    emulated = results.rows("emulation-paper.jsonl").where(row="run")
    head = ("configuration", *METRICS.values())
    return block(Table(head, table, caption), made_of=[rows, emulated])


def configuration(shape: str, policy: str) -> str:
    """Return the paper's name of a shape with a policy, such as ``2P_2pD`` of ``2P2D``, full."""
    if policy == "replica":
        return shape
    appends = "p" if policy == "full" else ""
    return re.sub(r"P(\d)D", rf"P_\1{appends}D", shape)


BLOCKS: dict[str, Callable[[Results], Block]] = {"emulation-paper": points}
