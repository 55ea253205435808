"""``ppd-eval emulate sweep``: the decision table of an emulated cluster.

Configuration, runs, rows and table are those of ``ppd-eval sweep``. Plans are stretched by the slow
motion, and what was measured is divided by it. A run for which the machine was too slow, or
of which a turn failed, is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ppd.errors import ConfigError
from ppd.machine import Machine as WorkerMachine
from ppd.machine import gpu_name

from ..cluster import Process, launching
from ..options import Commands, add_logs
from ..samples import Sample
from ..simulation.machine import Machine
from ..sweep.choice import choice_of
from ..sweep.config import Place, Run, SweepConfig, load_config, plan
from ..sweep.drive import Progress
from ..sweep.rows import RunResult, Writer, read_runs, served_by
from ..table.build import build
from ..traffic.conversations import Conversation
from .clusters import checked_use, held, roles_of, slow_motion_for, start_cluster, tried
from .knobs import Knobs
from .traces import RefusedRunError
from .workers import Emulated, emulated

_HELD = 0.87  # of a KV cache, by a run's conversations: prompts that wait for KV need room, too
_SAME = ("shape", "model", "hardware", "engine")  # fields that all runs of a file have in common

Measure = Callable[[Run, int], RunResult]
"""Measures a run and writes its rows; the number counts its earlier tries."""


def add_to(commands: Commands) -> None:
    """Declare ``emulate sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="the decision table of an emulated cluster",
        description=(
            "Measure both routes over a grid on an emulated cluster, and build a decision table. "
            "It continues what the file of raw rows holds. The last line is one JSON object."
        ),
    )
    parser.add_argument("config", type=Path, help="a TOML file, see eval/sweep/emulated.toml")
    parser.add_argument("--profile", required=True, help="of 'profile list', or a .json")
    parser.add_argument("--calibration", default="device", help="of the profile; default: device")
    parser.add_argument("--link-gbps", type=float, default=100.0)
    parser.add_argument("--slow-motion", type=float, help="default: by the heaviest cell")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of raw rows; is continued")
    parser.add_argument("--table", type=Path, required=True, help="the table to write")
    add_logs(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the raw file does not hold, then build the table.

    Raises:
        ConfigError: an option is wrong, or the file has rows of another cluster.
        PpdError: a worker failed, or the machine was too slow for the slow motion.
    """
    config = load_config(options.config)
    config.require_table()
    if config.clusters or config.clusters_here > 1 or config.worker_flags:
        raise ConfigError(
            f"{options.config}: clusters, clusters_here and worker_flags are of real workers"
        )
    machine = Machine(options.profile, options.link_gbps, options.calibration)
    slow_motion = options.slow_motion or slow_motion_of(config)
    where = where_measured(machine, slow_motion)
    results = list(read_runs(config, options.out))
    require_same((result.summary for result in results), where, options.out)
    medians = {result.run: result.medians() for result in results}
    if choice_of(config).next(medians, ()) is not None:
        writer = Writer(config, options.out, where)
        writer.begin()
        folder = options.logs / "emulation"
        with (
            launching(options.logs) as launch,
            emulated(launch, machine.load(), options.profile, folder) as cluster,
        ):
            cluster.knobs.set(Knobs(slow_motion, machine.link_gbps))
            routers = {
                policy: start_cluster(cluster, config.shape, ["--policy", policy], [], slow_motion)
                for policy in config.policies
            }
            warm_up(config, cluster, routers, slow_motion)
            drive(
                config,
                medians,
                lambda one, tries: _measured(
                    config, cluster, routers, slow_motion, writer, one, tries
                ),
            )
    print(json.dumps(build(config, options.out, options.table)))
    return 0


def slow_motion_of(config: SweepConfig) -> float:
    """Return the slow motion at which this machine's cores are mostly idle in every cell."""
    heaviest = len(config.axes.qps) - 1
    return max(
        slow_motion_for(
            len(roles_of(config.shape)), plan(config, Place(workload, heaviest), config.seeds[0])
        )
        for workload in config.workloads()
    )


def fitting(config: SweepConfig, place: Place, pool_tokens: int) -> SweepConfig:
    """Return the sweep with as many conversations in a run as a decode worker can hold.

    A local turn whose KV was evicted goes remote, and measures neither route.

    Args:
        pool_tokens: of its KV cache.
    """
    one = Conversation(0.0, config.planned_turns(place.workload, random.Random(0)))
    most = max(1, int(_HELD * pool_tokens / one.longest_tokens))
    return msgspec.structs.replace(config, conversations=min(config.conversations, most))


def where_measured(machine: Machine, slow_motion: float) -> dict[str, object]:
    """Return the fields that name an emulated cluster in a row."""
    profile = machine.load().file
    return {
        **served_by(profile.model),
        **machine.provenance(),
        "machine": msgspec.to_builtins(
            WorkerMachine(gpu_name(profile.gpu), profile.tensor_parallel, machine.link_gbps)
        ),
        "slow_motion": slow_motion,
        "hardware": f"emulated {machine.name}, slow motion {slow_motion:g}",
    }


def require_same(runs: Iterable[Mapping[str, Any]], where: Mapping[str, object], raw: Path) -> None:
    """Check that earlier runs are of the same cluster.

    Args:
        runs: rows of kind ``run``.
        where: fields that name the cluster in a row.

    Raises:
        ConfigError: some are not; the message names what differs.
    """
    for row in runs:
        for name in _SAME:
            if (before := row.get(name)) != where.get(name, before):
                raise ConfigError(
                    f"{raw}: has runs of {name} {before!r}, these are of {where[name]!r}: use "
                    "another file"
                )


def require_served(samples: Sequence[Sample]) -> None:
    """Check that all turns of a run were answered.

    Raises:
        RefusedRunError: some were not; the others were served by a cluster with less to do.
    """
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        raise RefusedRunError(f"{len(errors)} of {len(samples)} turns failed: {errors[0]}")


def drive(
    config: SweepConfig, medians: dict[Run, tuple[float, float] | None], measure: Measure
) -> None:
    """Measure until nothing is left; ``medians`` gets each run.

    Raises:
        RefusedRunError: the machine was too slow for a run, whenever it was tried.
    """
    choice, progress = choice_of(config), Progress(len(medians))
    while (job := choice.next(medians, ())) is not None:
        for one in job.runs(config.policies):
            if one not in medians:
                result = tried(partial(measure, one))
                medians[one] = result.medians()
                progress.print_run(result, choice.left(medians))
        progress.jobs += 1


def warm_up(
    config: SweepConfig, cluster: Emulated, routers: Mapping[str, Process], slow_motion: float
) -> None:
    """Hold a conversation by each router: the pacer of a worker that serves is warm."""
    first = plan(config, Place(next(iter(config.workloads())), None), config.seeds[0])[:1]
    for router in routers.values():
        asyncio.run(held(cluster, router, [first], slow_motion, "warm"))


def _measured(
    config: SweepConfig,
    cluster: Emulated,
    routers: Mapping[str, Process],
    slow_motion: float,
    writer: Writer,
    one: Run,
    tries: int,
) -> RunResult:
    """Measure one run, and write its rows.

    Args:
        tries: earlier ones. The router has seen their texts, so this one has others.

    Raises:
        ClusterError: a worker has ended; nothing is written.
        ConfigError: the rows cannot be written.
        RefusedRunError: the machine was too slow, or a turn failed; nothing is written.
    """
    plans = plan(fitting(config, one.place, cluster.profile.kv_pool_tokens), one.place, one.seed)
    parts = [plans] if one.place.qps is not None else [[single] for single in plans]
    seed = f"{one.place.workload}/{one.place.qps}/{one.seed}/{tries}"
    begun_s = time.monotonic()
    samples = asyncio.run(held(cluster, routers[one.policy], parts, slow_motion, seed))
    ended_s = time.monotonic()
    use = checked_use(cluster, begun_s, ended_s)
    require_served(samples)
    wall_s = (ended_s - begun_s) / slow_motion
    return writer.write(one, samples, wall_s, "emulated", use.fields())
