"""``ppd-eval sweep``: measure both routes in every cell of a grid, one raw row a turn.

For each seed and cell the two routes run one after the other, in an order that alternates, on
the same workers, with empty caches. Each workload is also measured quiet, one conversation at
a time. What was measured already is not measured again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ppd import __version__
from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.table_file import Axes

from . import tiny_model
from .client import hold
from .cluster import Launcher, Process, gpu_flags, launching, wait_all
from .conversations import Conversation, Exchange
from .endpoints import empty_caches, vocabulary_of
from .provenance import provenance
from .raw_rows import end_last_line
from .samples import Sample
from .workload_kinds import first_turn_tokens

Workload = tuple[int, int, int]  # bins of context, new and output tokens

_POLICY = {Route.REMOTE: "pd", Route.LOCAL: "full"}


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sweep, as its TOML file says (see ``cpu-sweep.toml``)."""

    shape: str
    turns: int
    conversations: int
    quiet_conversations: int
    think_s: float
    seeds: tuple[int, ...]
    worker_flags: tuple[str, ...]
    axes: Axes

    @property
    def digest(self) -> str:
        """Names what a row was measured with; the number of seeds may grow."""
        fields = msgspec.to_builtins(self) | {"seeds": None}
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:12]

    def workloads(self) -> Iterator[Workload]:
        a = self.axes
        sizes = (a.context_tokens, a.new_tokens, a.output_tokens)
        yield from product(*(range(len(bins)) for bins in sizes))

    def contexts(self, workload: Workload) -> list[int]:
        """Of the first turn (what it brings) and of each later one; their mean is the cell's."""
        context, new, output = self._tokens(workload)
        first = first_turn_tokens(context, new, output, self.turns)
        return [first, *(first + output + k * (new + output) for k in range(self.turns - 1))]

    def exchanges(self, workload: Workload, source: random.Random) -> tuple[Exchange, ...]:
        _, new, output = self._tokens(workload)
        first = Exchange(self.contexts(workload)[0], output)
        thinks = (source.expovariate(1 / self.think_s) for _ in range(self.turns - 1))
        return (first, *(Exchange(new, output, think_s) for think_s in thinks))

    def _tokens(self, workload: Workload) -> tuple[int, int, int]:
        c, n, o = workload
        a = self.axes
        return (
            round(a.context_tokens[c].at),
            round(a.new_tokens[n].at),
            round(a.output_tokens[o].at),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One workload under one route with one seed; ``qps`` is None if it is quiet."""

    workload: Workload
    qps: int | None
    route: Route
    seed: int


def load_config(path: Path) -> SweepConfig:
    """Raises:
    ConfigError: the file is missing, or not a sweep that can be run.
    """
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=SweepConfig)
    except (OSError, ValueError) as error:  # of TOML's syntax, and of msgspec's types
        raise ConfigError(f"{path}: {error}") from error
    if problems := list(_problems(config)):
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return config


def _problems(config: SweepConfig) -> Iterator[str]:
    if config.shape != "1P1D":
        yield f"shape must be 1P1D so far, got {config.shape}"
    if config.turns < 2 or config.conversations < 1 or config.quiet_conversations < 1:
        yield "turns must be at least 2, conversations and quiet_conversations at least 1"
    if not config.seeds or not config.think_s > 0:
        yield "seeds must name one, think_s must be above 0"
    if not all(bins for _, bins in config.axes.each()):
        yield "each axis must have a bin"
        return
    if config.turns < 2:
        return
    for workload in config.workloads():
        first, *later = config.contexts(workload)
        held = config.axes.context_tokens[workload[0]]
        if first < 64 or not all(held.low <= context < held.high for context in later):
            yield (
                f"context {held.at:g} with {config.axes.new_tokens[workload[1]].at:g} new tokens: "
                f"the first turn would have {first} tokens (at least 64), the later ones a "
                f"context of {later}, which must stay in [{held.low:g}, {held.high:g})"
            )


def plan(config: SweepConfig, run: Run) -> list[Conversation]:
    """The conversations of a run.

    They arrive as a Poisson process that has exactly as many arrivals in its time as it should:
    runs are short, and by chance alone their rates would differ by half. A quiet run's are held
    one after the other.
    """
    source = random.Random(f"{run.workload}/{run.qps}/{run.seed}")  # the same for both routes
    if run.qps is None:
        starts_s = [0.0] * config.quiet_conversations
    else:
        all_s = config.conversations * config.turns / config.axes.qps[run.qps].at
        starts_s = sorted(source.uniform(0.0, all_s) for _ in range(config.conversations))
    return [Conversation(at_s, config.exchanges(run.workload, source)) for at_s in starts_s]


def sweep(config: SweepConfig, model: str | None, out: Path, logs: Path) -> int:
    """Measure what ``out`` does not hold yet, and append it there."""
    path = tiny_model.resolve(model)
    done = {run for run, _, _ in read_runs(config, out)}
    runs = [run for run in _order(config) if run not in done]
    print(f"{len(runs)} runs to measure, {len(done)} in {out}", file=sys.stderr, flush=True)
    if not runs:
        return 0
    with launching(logs) as launch:
        workers = start_workers(launch, config, path)
        routers = {
            route: launch.router(workers[:1], workers[1:], "--policy", policy)
            for route, policy in _POLICY.items()
        }
        wait_all(list(routers.values()))
        asyncio.run(_measure_all(config, path, runs, workers, routers, out))
    return 0


def read_runs(
    config: SweepConfig, raw: Path
) -> Iterator[tuple[Run, dict[str, Any], list[dict[str, Any]]]]:
    """Each complete run of this configuration: what it was, its summary, its turns.

    A run is written as a whole, its summary last; one that was cut short is left out.

    Raises:
        ConfigError: the file holds something else.
    """
    turns: list[dict[str, Any]] = []
    try:
        lines = raw.read_bytes().split(b"\n") if raw.exists() else []
        for line in lines[:-1]:  # the last one is empty, or was cut short
            row = json.loads(line)
            if row["row"] == "turn":
                turns.append(row)
                continue
            c, n, o = row["workload"]
            run = Run((c, n, o), row["qps"], Route(row["route"]), row["seed"])
            if row["config"] == config.digest and row["turns"] <= len(turns):
                yield run, row, turns[len(turns) - row["turns"] :]
            turns = []
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{raw} holds no rows of a sweep: {error!r}") from error


def _order(config: SweepConfig) -> Iterator[Run]:
    """Seeds outermost, so that a sweep cut short has every cell before it has any twice."""
    for seed in config.seeds:
        number = seed
        for workload in config.workloads():
            for qps in (None, *range(len(config.axes.qps))):
                number += 1
                routes = [Route.REMOTE, Route.LOCAL]
                for route in routes if number % 2 == 0 else reversed(routes):
                    yield Run(workload, qps, route, seed)


def start_workers(launch: Launcher, config: SweepConfig, model: str) -> list[Process]:
    """A prefill and a decode worker, ready; without GPUs each on a core of its own."""
    prefill_gpu, decode_gpu = gpu_flags(0, 2), gpu_flags(1, 2)
    cores = (0, 1) if not prefill_gpu else (None, None)
    flags = config.worker_flags
    prefill = launch.worker(Role.PREFILL, model, *flags, *prefill_gpu, core=cores[0])
    decode = launch.worker(Role.DECODE, model, *flags, *decode_gpu, core=cores[1])
    wait_all([prefill, decode])
    return [prefill, decode]


async def _measure_all(
    config: SweepConfig,
    model: str,
    runs: list[Run],
    workers: list[Process],
    routers: dict[Route, Process],
    out: Path,
) -> None:
    end_last_line(out)
    async with aiohttp.ClientSession() as http:
        vocabulary = await vocabulary_of(http, workers[1].url)
        # Kernels warm up, connections open: not measured.
        for router in routers.values():
            await hold(router.url, plan(config, runs[0]), seed="warm", vocabulary=vocabulary)
        started_s = time.monotonic()
        for number, run in enumerate(runs, 1):
            await empty_caches(http, [worker.url for worker in workers])
            begun_s = time.monotonic()
            samples: list[Sample] = []
            plans = plan(config, run)
            for i, part in enumerate([plans] if run.qps is not None else [[one] for one in plans]):
                samples += await hold(
                    routers[run.route].url,
                    part,
                    seed=f"{run.workload}/{run.qps}/{run.seed}/{i}",
                    vocabulary=vocabulary,
                )
            summary = _write(config, out, run, samples, model, time.monotonic() - begun_s)
            left_s = (time.monotonic() - started_s) / number * (len(runs) - number)
            print(
                f"\r{number}/{len(runs)} {run.workload} qps {run.qps} {run.route} seed {run.seed}: "
                f"{len(samples)} turns, {summary['failed']} failed, {summary['strayed']} strayed; "
                f"{left_s / 60:.0f} min left   ",
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )


def _write(
    config: SweepConfig, out: Path, run: Run, samples: list[Sample], model: str, wall_s: float
) -> dict[str, Any]:
    rows = [{"row": "turn", **asdict(sample)} for sample in samples]
    summary = {
        "row": "run",
        "config": config.digest,
        "workload": run.workload,
        "qps": run.qps,
        "route": run.route,
        "turns": len(samples),
        "failed": sum(bool(sample.error) for sample in samples),
        # Later turns that took another route than the one measured: refused ones.
        "strayed": sum(sample.turn > 1 and sample.route != run.route for sample in samples),
        "wall_s": round(wall_s, 2),
        "model": Path(model).name,
        "engine": f"sglang {version('sglang')}",
        "plugin": __version__,
        **provenance(run.seed),
    }
    with out.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in (*rows, summary)))
    return summary
