"""``ppd-eval bench router``: what a router costs, ours and others', before the same fake workers.

Every router has one core, all the same one, and takes its turn; workers and client share
another. Each request is a first turn: prefill and decode leg. ``ours`` has its default options,
``ours_everything`` the optional parts as well (``everything.py``). What is counted is CPU time of
the router's processes, and what it adds to the time to first token of a worker asked directly.
The floors are no routers: they copy bytes, in Python, ``floor_two_legs`` to both workers
(``splice.py``), ``floor_kernel`` in C with three system calls a chunk (``splice.c``), and
``floor_uring``, for which liburing must be there, with fewer than one (``splice_uring.c``).
``baseline`` is the router of another checkout of this project. Its rounds are paired with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
import uvloop

from ppd.errors import ConfigError

from ..cluster import ClusterError, Launcher, Process, free_port, launching
from ..options import Commands, add_logs, add_out
from ..provenance import commit_of, provenance
from ..raw_rows import appending
from . import compiled as compiled_router
from . import everything
from . import rivals as rival_routers
from .paired import paired_ratios
from .stream_client import Received, Tally, chat_request, connect

_CHECKOUT = Path(__file__).parents[2]
_TABLE = _CHECKOUT / "tables/cpu-tiny-llama-1P1D.json"
_ROUTER_CORE, _OTHER_CORE = 0, 1
_START_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that are open at once, each of ``chunks`` in bursts every ``interval_s``."""

    name: str
    streams: int
    chunks: int
    interval_s: float
    burst: int = 1
    window: float = 0.6  # of all chunks: counted when all streams are open, and none has ended


_IN_C = {"floor_kernel": ("splice", ()), "floor_uring": ("splice_uring", ("-luring",))}
OURS = ("ours", "ours_everything", "ours_compiled")
USUAL = (*OURS, *rival_routers.NAMES, "floor_kernel", "floor", "floor_two_legs")
FLOORS = (*_IN_C, "floor", "floor_two_legs")
BASELINES = {"ours": "baseline", "ours_compiled": "baseline_compiled"}
NAMES = (*OURS, *rival_routers.NAMES, *FLOORS)
LOADS = (
    Load("burst", 32, 512, 0.1, 32),
    Load("paced_1", 1, 150, 0.02),
    Load("paced_64", 64, 150, 0.02),
    Load("paced", 512, 150, 0.02),
    Load("open_4096", 4096, 16, 0.5),
)


@dataclass(slots=True)
class Candidate:
    """A router under test.

    Attributes:
        idle_mb: of memory when it had served some requests, and no stream was open.
    """

    name: str
    process: Process
    port: int
    idle_mb: float = 0.0
    errors: list[str] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Of all threads, by the scheduler's clock: that of ``stat`` ticks every 10 ms."""
        spent_ns = 0
        for process in self._family():
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    spent_ns += int((thread / "schedstat").read_text().split()[0])
        return spent_ns / 1e9

    def mb(self) -> float:
        return sum(float(p.memory_info().rss) for p in self._family()) / 2**20

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.popen.pid)
        return [parent, *parent.children(recursive=True)]

    def note(self, answers: Sequence[Received], chunks: int) -> None:
        for answer in answers:
            if answer.problem is not None:
                self.errors.append(answer.problem)
            elif answer.chunks != chunks:
                self.errors.append(f"{answer.chunks} chunks instead of {chunks}")


class Bench:
    """
    Args:
        direct: port of the decode worker itself.
    """

    def __init__(self, http: aiohttp.ClientSession, direct: int, model: str) -> None:
        self._http = http
        self._direct = direct
        self._model = model
        self._asked = 0

    async def closed_loop(self, candidate: Candidate, streams: int, requests: int) -> float:
        """CPU microseconds of a request that does not stream."""
        each = requests // streams
        connections = await connect(candidate.port, streams, Tally())

        async def ask(connection: int) -> list[Received]:
            link = connections[connection]
            return [await link.ask(self._request(1, False), stream=False) for _ in range(each)]

        before_s = candidate.cpu_s()
        answers = await asyncio.gather(*(ask(i) for i in range(streams)))
        spent_s = candidate.cpu_s() - before_s
        for of_one in answers:
            candidate.note(of_one, 1)
        for link in connections:
            link.close()
        return 1e6 * spent_s / (each * streams)

    async def streams(self, candidate: Candidate, load: Load) -> tuple[float, float]:
        """CPU microseconds of a chunk while all streams are open; memory then, in MB."""
        rhythm = {"interval_s": load.interval_s, "burst": load.burst}
        async with self._http.post(f"http://127.0.0.1:{self._direct}/rhythm", json=rhythm):
            pass
        tally = Tally()
        connections = await connect(candidate.port, load.streams, tally)
        asked = [
            asyncio.create_task(link.ask(self._request(load.chunks, True), stream=True))
            for link in connections
        ]
        every = asyncio.gather(*asked)
        await tally.reached(load.streams, 0, every)
        before_s, first = candidate.cpu_s(), tally.chunks
        last = first + load.window * (load.streams * load.chunks - first)
        await tally.reached(0, int(last), every)
        counted = tally.chunks - first
        spent_s, mb = candidate.cpu_s() - before_s, candidate.mb()
        candidate.note(await every, load.chunks)
        for link in connections:
            link.close()
        return 1e6 * spent_s / max(1, counted), mb

    async def first_tokens(self, candidate: Candidate, pairs: int) -> tuple[float, float]:
        """Added to the time to first token, p50 and p99 over the worker's own p50, in ms."""
        async with self._http.post(
            f"http://127.0.0.1:{self._direct}/rhythm", json={"interval_s": 0.0, "burst": 2}
        ):
            pass
        took: dict[int, list[float]] = defaultdict(list)
        tally = Tally()
        links = {
            port: (await connect(port, 1, tally))[0] for port in (candidate.port, self._direct)
        }
        for link in links.values():
            link.acknowledges_at_once = True  # else Nagle's algorithm costs some of them 40 ms
        for _ in range(pairs):
            for port, link in links.items():
                answer = await link.ask(self._request(2, True), stream=True)
                took[port].append(1e3 * answer.ttft_s)
                if port == candidate.port:
                    candidate.note([answer], 2)
        for link in links.values():
            link.close()
        cuts = statistics.quantiles(took[candidate.port], n=100)
        direct = statistics.median(took[self._direct])
        return cuts[49] - direct, cuts[98] - direct

    def _request(self, chunks: int, stream: bool) -> bytes:
        """No two alike: each opens a conversation."""
        self._asked += 1
        return chat_request(self._model, f"Question {self._asked}.", chunks, stream=stream)


async def measure(
    candidates: Sequence[Candidate],
    direct: int,
    model: str,
    rounds: int,
    requests: int,
    loads: Sequence[Load],
) -> list[dict[str, object]]:
    """A row for each router and round, routers in turn."""
    rows: list[dict[str, object]] = []
    async with aiohttp.ClientSession() as http:
        bench = Bench(http, direct, model)
        for candidate in candidates:
            await until_ready(bench, candidate)
            await bench.closed_loop(candidate, 32, 640)
            await bench.first_tokens(candidate, 20)
            candidate.errors.clear()
            candidate.idle_mb = candidate.mb()
        for number in range(rounds):
            for candidate in in_round(candidates, number):
                rows.append(await one_round(bench, candidate, number, requests, loads))
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def in_round(candidates: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: rotated, and reversed in every second round."""
    first = number // 2 % len(candidates)
    order = [*candidates[first:], *candidates[:first]]
    return order[::-1] if number % 2 else order


async def one_round(
    bench: Bench, candidate: Candidate, number: int, requests: int, loads: Sequence[Load]
) -> dict[str, object]:
    row: dict[str, object] = {"router": candidate.name, "round": number}
    row["cpu_us_per_request"] = await bench.closed_loop(candidate, 32, requests)
    added = await bench.first_tokens(candidate, 200)
    row["added_ttft_p50_ms"], row["added_ttft_p99_ms"] = added
    for load in loads:
        us, mb = await bench.streams(candidate, load)
        row[f"cpu_us_per_chunk_{load.name}"] = us
        if load.streams >= 1000:
            row["mb_per_1000_streams"] = 1e3 * (mb - candidate.idle_mb) / load.streams
    row["errors"] = len(candidate.errors)
    if candidate.errors:
        row["errors_seen"] = sorted(set(candidate.errors))[:5]
    candidate.errors = []
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}


async def until_ready(bench: Bench, candidate: Candidate) -> None:
    """Raises: ClusterError."""
    deadline_s = time.monotonic() + _START_S
    problem = "it does not listen"
    while time.monotonic() < deadline_s:
        try:
            await bench.closed_loop(candidate, 1, 1)
        except OSError:
            pass
        else:
            if not candidate.errors:
                return
            problem = candidate.errors[-1]
        candidate.errors.clear()
        await asyncio.sleep(0.2)
    raise ClusterError(f"{candidate.name} is not ready: {problem}{candidate.process.tail()}")


def summarize(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Medians over rounds, of what was measured; errors are added up."""
    told: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(str(row["router"]) for row in rows):
        mine = [row for row in rows if row["router"] == name]
        told[name] = {
            value: round(statistics.median(float(str(row[value])) for row in mine), 3)
            for value in (
                "cpu_us_per_request",
                "cpu_us_per_chunk_burst",
                "cpu_us_per_chunk_paced",
                "added_ttft_p50_ms",
                "added_ttft_p99_ms",
                "mb_per_1000_streams",
            )
            if value in mine[0]
        }
        told[name]["errors"] = sum(int(str(row["errors"])) for row in mine)
    return told


def paired(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, Any]]:
    """Compare our routers with those of the baseline checkout, if it was measured."""
    names = {row["router"] for row in rows}
    return {
        f"{ours}/{baseline}": paired_ratios(rows, ours, baseline)
        for ours, baseline in BASELINES.items()
        if ours in names and baseline in names
    }


def add_to(commands: Commands) -> None:
    """Declare ``bench router``."""
    parser = commands.add_parser("router", help="what a router costs, ours and others'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3200, help="of the closed loop")
    parser.add_argument("--routers", nargs="+", default=USUAL, choices=NAMES)
    parser.add_argument(
        "--rivals",
        type=Path,
        default=Path(".run/rivals"),
        help="the environment that the others are installed in, on the first run",
    )
    loads = [load.name for load in LOADS]
    parser.add_argument(
        "--loads", nargs="*", default=loads, choices=loads, help="none: requests and TTFT alone"
    )
    parser.add_argument(
        "--compiled",
        type=Path,
        default=Path(".run/compiled"),
        help="where our router is compiled to, when its source has changed",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="TREE",
        help="another checkout of this project: its router is compared with ours, round by round",
    )
    add_logs(parser)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the chosen routers; print one JSON object as the last line.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: the baseline is no checkout, or is compared with no router of ours.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loads = [load for load in LOADS if load.name in options.loads]
    names = list(options.routers)
    if options.baseline is not None:
        names = with_baselines(names, options.baseline)
    model = str(json.loads(_TABLE.read_text())["model"])
    with appending(options.out) as write, launching(options.logs) as launch:
        os.sched_setaffinity(0, {_OTHER_CORE})
        candidates, direct = _start(launch, model, names, options)
        rows = uvloop.run(
            measure(candidates, direct, model, options.rounds, options.requests, loads)
        )
        about: dict[str, object] = {"loads": [asdict(load) for load in loads]}
        about |= rival_routers.VERSIONS
        if options.baseline is not None:
            about["baseline_commit"] = commit_of(options.baseline)
        for row in rows:
            write({**row, **about, **provenance(0)})
    summary = summarize(rows)
    failed = any(values["errors"] for values in summary.values())
    ratios = paired(rows)
    print(json.dumps({**summary, **({"paired": ratios} if ratios else {})}))
    return int(failed)


def with_baselines(names: Sequence[str], tree: Path) -> list[str]:
    """Add the baseline of each router of ours, right after it.

    Raises:
        ConfigError: ``tree`` is no checkout of this project, or there is nothing to compare.
    """
    if not (tree / "router/cli.py").is_file():
        raise ConfigError(f"{tree}: is no checkout of this project: it has no router/cli.py")
    if not any(name in BASELINES for name in names):
        raise ConfigError(f"--baseline is compared with one of {', '.join(BASELINES)}")
    return [
        name
        for ours in names
        for name in (ours, *((BASELINES[ours],) if ours in BASELINES else ()))
    ]


def _floor(name: str, folder: Path) -> list[str]:
    if name not in _IN_C:
        return [sys.executable, "-m", f"{__package__}.splice"]
    program, libraries = _IN_C[name]
    source, made = Path(__file__).with_name(f"{program}.c"), folder / program
    command = ["cc", "-O2", "-o", str(made), str(source), *libraries]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise ConfigError(f"{source} cannot be compiled: {built.stderr.strip()[-500:]}")
    return [str(made)]


def _python(name: str, options: argparse.Namespace) -> list[str]:
    """The command that runs a router of ours, or of the baseline."""
    checkout = _CHECKOUT if name in OURS else options.baseline.resolve()
    if name.endswith("_compiled"):
        folder = options.compiled if name in OURS else options.compiled / "baseline"
        path, module = compiled_router.install(folder, checkout), "ppd_router.cli"
    else:
        path, module = checkout, "router.cli"
    # -P: the folder we run in holds a package of that name, too. -B: the tree stays as it is.
    return ["env", f"PYTHONPATH={path.resolve()}", sys.executable, "-P", "-B", "-m", module]


def _start(
    launch: Launcher, model: str, names: Sequence[str], options: argparse.Namespace
) -> tuple[list[Candidate], int]:
    p, d = free_port(), free_port()
    fakes = [sys.executable, "-m", f"{__package__}.fake_workers", str(p), str(d), model]
    workers = launch.start("fake-workers", d, fakes, _OTHER_CORE)
    workers.wait_ready("/ready", time.monotonic() + _START_S)
    prefill, decode = f"http://127.0.0.1:{p}", f"http://127.0.0.1:{d}"
    candidates: list[Candidate] = []
    for name in names:
        port = free_port()
        if name in FLOORS:
            argv = [*_floor(name, launch.logs), str(port), str(d)]
            argv += [str(p)] if name == "floor_two_legs" else []
            process = launch.start(name, port, argv, _ROUTER_CORE)
        elif name in OURS or name in BASELINES.values():
            argv = [
                *(*_python(name, options), "--port", str(port)),
                *("--prefill", prefill, "--decode", decode, "--table", str(_TABLE)),
            ]
            if name == "ours_everything":
                argv += ["--config", str(everything.config(launch.logs, f"{decode}/v1/traces"))]
            else:
                argv += ["--log-level", "warning"]  # as the others
            process = launch.start(name, port, argv, _ROUTER_CORE)
        else:
            binaries = rival_routers.install(options.rivals)
            process = rival_routers.start(launch, binaries, name, prefill, [decode], _ROUTER_CORE)
        candidates.append(Candidate(name, process, int(process.url.rpartition(":")[2])))
    return candidates, d
