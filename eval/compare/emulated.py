"""A comparison on an emulated cluster: every way serves the same windows, in slow motion.

Rows are those of a comparison of real workers, in the emulated cluster's own time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ppd.errors import ConfigError
from ppd.table import Table

from ..cluster import Process, launching
from ..emulation.clusters import checked_use, held, start_cluster, tried
from ..emulation.knobs import Knobs
from ..emulation.model import MODEL
from ..emulation.sweeping import require_same, where_measured
from ..emulation.workers import Emulated, emulated
from ..raw_rows import append_whole, end_last_line
from ..traffic.conversations import Conversation
from .config import PPD, Comparison, Emulation, Trace, ways
from .drive import Study, check_lengths, read_rows, run_rows, runs_left
from .way import Way


def run(study: Study, emulation: Emulation, out: Path, logs: Path) -> None:
    """Measure what ``out`` does not hold yet, and append it there.

    Raises:
        ConfigError: a trace, a profile or ``out`` cannot be read or written, ``out`` has runs of
            another cluster, the table is of another model, or a conversation is too long.
        ClusterError: a worker has ended; what was measured is kept.
        RefusedRunError: the machine was too slow for a run, whenever it was tried.
    """
    windows, left = study.windows(), runs_left(study, out)
    machine = emulation.machine
    profile = machine.load()
    where = {"shape": emulation.shape, **where_measured(machine, emulation.slow_motion)}
    require_same((row for row in read_rows(out) if row["row"] == "run"), where, out)
    check_lengths(windows, min(MODEL.max_context_tokens, profile.kv_pool_tokens))
    if not left:
        return
    end_last_line(out)
    with (
        launching(logs) as launch,
        emulated(launch, profile, machine.profile, logs / "emulation") as cluster,
    ):
        cluster.knobs.set(Knobs(emulation.slow_motion, machine.link_gbps))
        table = study.table and table_for(cluster.model, study.table, profile.file.model, logs)
        routers = _start_routers(cluster, study.config, table, emulation)
        first = [_begun(next(iter(windows.values()))[0])]
        for router in routers.values():  # the pacer of a worker that serves is warm
            asyncio.run(held(cluster, router, [first], emulation.slow_motion, "warm"))
        for number, (trace, seed, way) in enumerate(left, 1):
            plans = windows[trace.name, seed]
            place = (trace, seed, way)
            rows = tried(partial(_measured, cluster, routers, where, place, plans))
            append_whole(out, rows)
            print(
                f"{number}/{len(left)} {trace.name} seed {seed} {way.name}: {len(rows) - 1} turns",
                file=sys.stderr,
                flush=True,
            )


def table_for(served: Path, table: Path, model: str, folder: Path) -> Path:
    """Write a copy of a table that is of the model which the emulated workers serve.

    Args:
        served: that model.
        model: the one that is emulated.
        folder: where to write it.

    Raises:
        ConfigError: the table is of another model than ``model``.
        OSError: a file cannot be read or written.
        TableError: it is no table.
    """
    of_it = Table.parse(table.read_bytes())
    if not of_it.is_for([model]):
        raise ConfigError(f"{table}: is of {of_it.record.model}, and {model} is emulated")
    copy = folder / table.name
    copy.write_bytes(msgspec.json.encode(msgspec.structs.replace(of_it.record, model=served.name)))
    return copy


def _begun(conversation: Conversation) -> Conversation:
    """A first turn and a later one: those of an agent would take as long as a window."""
    return replace(conversation, turns=conversation.turns[:2])


def _start_routers(
    cluster: Emulated, config: Comparison, table: Path | None, emulation: Emulation
) -> dict[str, Process]:
    """One for each policy; weights and targets come with the requests."""
    routers: dict[str, Process] = {}
    for policy in dict.fromkeys(way.policy for way in ways(config)):
        flags = ["--policy", policy]
        if policy == PPD and table is not None:
            flags += ["--table", str(table)]
        routers[policy] = start_cluster(cluster, emulation.shape, flags, [], emulation.slow_motion)
    return routers


def _measured(
    cluster: Emulated,
    routers: Mapping[str, Process],
    where: Mapping[str, object],
    place: tuple[Trace, int, Way],
    plans: Sequence[Conversation],
    tries: int,
) -> list[dict[str, Any]]:
    """Serve a window in one way, and return its rows.

    Args:
        where: fields that name the cluster.
        tries: earlier ones. The router has seen their texts, so this one has others.

    Raises:
        RefusedRunError: the machine was too slow.
        ClusterError: a worker has ended.
    """
    trace, seed, way = place
    slow_motion = cluster.knobs.slow_motion
    before, begun_s = _sent_bytes(cluster), time.monotonic()
    samples = asyncio.run(
        held(
            cluster,
            routers[way.policy],
            [plans],
            slow_motion,
            f"{trace.name}/{seed}/{way.name}/{tries}",
            way.headers,
        )
    )
    ended_s = time.monotonic()
    use = checked_use(cluster, begun_s, ended_s)
    about = {"kv_bytes_moved": _sent_bytes(cluster) - before, **use.fields(), **where}
    return run_rows(place, samples, plans, (ended_s - begun_s) / slow_motion, about)


def _sent_bytes(cluster: Emulated) -> int:
    return sum(cluster.knobs.sent_bytes(name) for name in cluster.workers)
