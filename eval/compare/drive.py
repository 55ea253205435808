"""Measures every way on the same windows, one after the other on the same workers."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ppd import __version__
from ppd.contract import Role
from ppd.errors import ConfigError, WorkerError

from .. import raw_rows, tiny_model
from ..client import hold
from ..cluster import Launcher, Process, gpu_flags, launching, wait_all
from ..endpoints import empty_caches, is_ready, max_context_of, vocabulary_of
from ..prometheus import read_metrics
from ..provenance import provenance
from ..raw_rows import append_whole, end_last_line
from ..samples import Sample
from ..summary import Slo, summarize
from ..traffic.conversations import Conversation
from .config import BASE, FULL_TRANSFER, PPD, REPLICA, Comparison, Trace, ways, window
from .way import Way

_WARM = 4  # conversations, through every router

Key = tuple[str, int, str]  # trace, seed, way


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a comparison; all are up at once.

    Attributes:
        uncached: a decode worker without radix cache, on the core of the other.
        replicas: two, on the cores of both.
    """

    prefill: Process
    decode: Process
    uncached: Process | None
    replicas: tuple[Process, ...]

    @property
    def urls(self) -> list[str]:
        """The URLs of all workers."""
        return [worker.url for worker in self.all]

    @property
    def all(self) -> list[Process]:
        """All workers."""
        uncached = [self.uncached] if self.uncached else []
        return [self.prefill, self.decode, *uncached, *self.replicas]


@dataclass(frozen=True, slots=True)
class Study:
    """What to compare, on which files."""

    config: Comparison
    files: Mapping[str, Path]
    tokenizer: Path | None
    table: Path | None

    def windows(self) -> dict[tuple[str, int], list[Conversation]]:
        """Read the windows of all traces, by name of the trace and seed.

        Raises:
            ConfigError: a trace cannot be read, or has no such window.
        """
        tuning = self.config.tuning
        return {
            (trace.name, seed): window(trace, self.files, self.tokenizer, seed, tuning)
            for trace, seed in self._places()
        }

    def _places(self) -> list[tuple[Trace, int]]:
        config = self.config
        return [(trace, seed) for trace in config.traces for seed in config.seeds_of(trace)]

    def order(self) -> list[tuple[Trace, int, Way]]:
        """Yield all runs: seeds outermost, the ways in another order each time."""
        every = []
        for trace, seed in sorted(self._places(), key=lambda place: place[1]):
            shuffled = ways(self.config)
            random.Random(f"{trace.name}/{seed}").shuffle(shuffled)
            every += [(trace, seed, way) for way in shuffled]
        return every


def run(study: Study, model: str | None, out: Path, logs: Path) -> None:
    """Measure what ``out`` does not hold yet, and append it there.

    Raises:
        ConfigError: a trace or ``out`` cannot be read or written, or a conversation is too long.
        WorkerError: a worker was lost; what was measured is kept.
    """
    windows, left = study.windows(), runs_left(study, out)
    if not left:
        return
    path = tiny_model.resolve(model)
    end_last_line(out)
    with launching(logs) as launch:
        workers = _start_workers(launch, study.config, path)
        routers = _start_routers(launch, study, workers)
        asyncio.run(_measure(study, path, windows, left, workers, routers, out))


def runs_left(study: Study, out: Path) -> list[tuple[Trace, int, Way]]:
    """Return the runs that a file does not hold, and print how many there are."""
    done = measured(out)
    left = [
        (trace, seed, way)
        for trace, seed, way in study.order()
        if (trace.name, seed, way.name) not in done
    ]
    print(f"{len(left)} runs to measure, {len(done)} in {out}", file=sys.stderr, flush=True)
    return left


def measured(out: Path) -> set[Key]:
    """Return the complete runs of a file: a run's row is written behind its turns."""
    return {
        (row["trace"], row["seed"], row["way"]) for row in _each_row(out) if row["row"] == "run"
    }


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Read the raw rows of a comparison.

    Raises:
        ConfigError: it cannot be read, or a line is no row of a comparison.
    """
    return list(_each_row(out))


def _each_row(out: Path) -> Iterator[dict[str, Any]]:
    for number, row in raw_rows.read_rows(out) if out.exists() else ():
        named = {"trace", "seed", "way", "row"} <= row.keys()
        if row.get("part") != "compare" or not named:
            raise ConfigError(f"{out}:{number}: no row of a comparison")
        yield row


def _start_workers(launch: Launcher, config: Comparison, model: str) -> Workers:
    count = 2 + (FULL_TRANSFER in config.policies) + 2 * (REPLICA in config.policies)
    prefill_gpu, decode_gpu = gpu_flags(0, count), gpu_flags(1, count)
    cores = (0, 1) if not prefill_gpu else (None, None)
    flags = config.worker_flags
    metrics = "--enable-metrics"  # what was sent
    prefill = launch.worker(Role.PREFILL, model, *flags, metrics, *prefill_gpu, core=cores[0])
    decode = launch.worker(Role.DECODE, model, *flags, *decode_gpu, core=cores[1])
    uncached = None
    if FULL_TRANSFER in config.policies:
        plain = [*flags, *decode_gpu, "--ppd-plain"]
        uncached = launch.worker(Role.DECODE, model, *plain, name="uncached", core=cores[1])
    replicas = [
        launch.worker(Role.REPLICA, model, *flags, *gpu, core=core)
        for gpu, core in zip((prefill_gpu, decode_gpu), cores, strict=True)
        if REPLICA in config.policies
    ]
    workers = Workers(prefill, decode, uncached, tuple(replicas))
    wait_all(workers.all)
    return workers


def _start_routers(launch: Launcher, study: Study, workers: Workers) -> dict[str, Process]:
    """One for each policy; weights come with the requests."""
    routers: dict[str, Process] = {}
    for policy in dict.fromkeys(way.policy for way in ways(study.config)):
        decode, flags = workers.decode, ["--policy", policy]
        if policy == REPLICA:
            routers[policy] = launch.router([], [], *flags, replica=workers.replicas)
            continue
        if policy == FULL_TRANSFER:
            assert workers.uncached is not None
            decode, flags = workers.uncached, ["--policy", BASE]
        elif policy == PPD and study.table is not None:
            flags += ["--table", str(study.table)]
        routers[policy] = launch.router([workers.prefill], [decode], *flags)
    wait_all(list(routers.values()))
    return routers


async def _measure(
    study: Study,
    model: str,
    windows: Mapping[tuple[str, int], list[Conversation]],
    left: Sequence[tuple[Trace, int, Way]],
    workers: Workers,
    routers: Mapping[str, Process],
    out: Path,
) -> None:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        vocabulary = await vocabulary_of(http, workers.decode.url)
        most = await max_context_of(http, workers.decode.url)
        check_lengths(windows, most)
        first = next(iter(windows.values()))[:_WARM]
        for router in routers.values():  # kernels warm up, connections open: not measured
            await hold(router.url, first, seed="warm", vocabulary=vocabulary)
        begun_s = time.monotonic()
        for number, (trace, seed, way) in enumerate(left, 1):
            await empty_caches(http, workers.urls)
            before = _moved_bytes(workers)
            plans = windows[trace.name, seed]
            at_s = time.monotonic()
            samples = await hold(
                routers[way.policy].url,
                plans,
                seed=f"{trace.name}/{seed}/{way.name}",  # new to the router
                vocabulary=vocabulary,
                headers=way.headers,
            )
            wall_s = time.monotonic() - at_s
            lost = [url for url in workers.urls if not await is_ready(http, url)]
            if lost:
                raise WorkerError(
                    f"{', '.join(lost)} do not answer; what was measured is kept: the same "
                    "command goes on from there"
                )
            moved = _moved_bytes(workers) - before
            about = {
                "kv_bytes_moved": moved,
                "worker_flags": study.config.worker_flags,
                "model": Path(model).name,
                "engine": f"sglang {version('sglang')}",
                "plugin": __version__,
            }
            append_whole(out, run_rows((trace, seed, way), samples, plans, wall_s, about))
            took_s = (time.monotonic() - begun_s) / number * (len(left) - number)
            failed = sum(bool(sample.error) for sample in samples)
            print(
                f"{number}/{len(left)} {trace.name} seed {seed} {way.name}: {len(samples)} turns, "
                f"{failed} failed; {took_s / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )


def run_rows(
    place: tuple[Trace, int, Way],
    samples: Sequence[Sample],
    plans: Sequence[Conversation],
    wall_s: float,
    about: Mapping[str, object],
) -> list[dict[str, Any]]:
    """Return a row for each turn of a run, then the run's own.

    Args:
        about: fields of the run's row; they replace those of the provenance.
    """
    trace, seed, way = place
    where = {"part": "compare", "trace": trace.name, "way": way.name, "seed": seed}
    turns = [{"row": "turn", **where, **asdict(sample)} for sample in samples]
    run_row = {
        "row": "run",
        **where,
        **asdict(summarize(samples, plans, wall_s, Slo())),
        "cached_tokens": sum(one.cached_tokens for one in samples if one.turn > 1),
        "asked": msgspec.to_builtins(trace),
        **provenance(seed),
        **about,
    }
    return [*turns, run_row]


def check_lengths(windows: Mapping[tuple[str, int], list[Conversation]], most: int | None) -> None:
    """Check that a model can hold all conversations.

    Raises:
        ConfigError: one is too long for ``most`` tokens.
    """
    for (name, seed), plans in windows.items():
        longest = max(plan.longest_tokens for plan in plans)
        if most is not None and longest > most:
            raise ConfigError(
                f"trace {name}, seed {seed}: a conversation grows to {longest} tokens, the model "
                f"takes {most}: scale it, or end it with ?max_context={most}"
            )


def _moved_bytes(workers: Workers) -> int:
    """KV that the prefill worker has sent so far, as the engine counts it."""
    total = 0.0
    for name, _, value in read_metrics(workers.prefill.url):
        if name == "sglang:kv_transfer_total_mb_sum":
            total += value * 1024 * 1024
    return round(total)
