"""The routers that ``bench router`` compares: ours, others', a baseline's, and the floors.

Every router has the same core to itself; workers and client share another.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ppd.decision import Route
from ppd.errors import ConfigError

from ..cluster import Launcher, Process, free_port
from ..http_stream import Reply
from . import compiled as compiled_router
from . import everything
from . import rivals as rival_routers

CHECKOUT = Path(__file__).parents[2]
TABLE = CHECKOUT / "tables/cpu-tiny-llama-1P1D.json"
ROUTER_CORE, OTHER_CORE = 0, 1
START_S = 60.0
_PACKAGE = __package__.removesuffix(".routers")

_IN_C = {"floor_kernel": ("splice", ()), "floor_uring": ("splice_uring", ("-luring",))}
PROCESSES = {"ours_2_processes": 2, "ours_4_processes": 4}
OURS = ("ours", "ours_everything", "ours_compiled", *PROCESSES)
USUAL = (*OURS, *rival_routers.NAMES, "floor_kernel", "floor", "floor_two_legs")
FLOORS = (*_IN_C, "floor", "floor_two_legs")
BASELINES = {"ours": "baseline", "ours_compiled": "baseline_compiled"}
NAMES = (*OURS, *rival_routers.NAMES, *FLOORS)
# Those that decide a route, in one process: two processes share no sessions.
PLANNING = ("ours", "ours_everything", "ours_compiled", *BASELINES.values())


@dataclass(slots=True)
class Candidate:
    """A router under test.

    Attributes:
        idle_mb: its memory after some requests, when no stream is open.
        errors: what was wrong with answers.
    """

    name: str
    process: Process
    port: int
    idle_mb: float = 0.0
    errors: list[str] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads so far.

        They are the scheduler's: the clock of ``stat`` ticks every 10 ms.
        """
        return sum(_cpu_s(process.pid) for process in self._family())

    def children_cpu_s(self) -> dict[int, float]:
        """Return the CPU seconds so far of each process that it has started."""
        return {process.pid: _cpu_s(process.pid) for process in self._family()[1:]}

    def mb(self) -> float:
        """Return its resident memory in MiB."""
        return sum(float(p.memory_info().rss) for p in self._family()) / 2**20

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.popen.pid)
        return [parent, *parent.children(recursive=True)]

    def note(self, answers: Sequence[Reply], chunks: int) -> None:
        """Keep what is wrong with answers that should have so many chunks."""
        for answer in answers:
            if (problem := answer.problem()) is not None:
                self.errors.append(problem)
            elif answer.chunks != chunks:
                self.errors.append(f"{answer.chunks} chunks instead of {chunks}")

    def note_routes(self, answers: Sequence[Reply], route: Route) -> None:
        """Keep the answers that took another route."""
        for answer in answers:
            if (taken := answer.headers.get("x-ppd-route")) != route:
                reason = answer.headers.get("x-ppd-reason")
                self.errors.append(f"route {taken} ({reason}) instead of {route}")


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    spent_ns = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


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
    checkout = CHECKOUT if name in OURS else options.baseline.resolve()
    if name.endswith("_compiled"):
        folder = options.compiled if name in OURS else options.compiled / "baseline"
        path, module = compiled_router.install(folder, checkout), "ppd_router.cli"
    else:
        path, module = checkout, "router.cli"
    # -P: the folder we run in holds a package of that name, too. -B: the tree stays as it is.
    return ["env", f"PYTHONPATH={path.resolve()}", sys.executable, "-P", "-B", "-m", module]


def start(
    launch: Launcher, model: str, names: Sequence[str], options: argparse.Namespace
) -> tuple[list[Candidate], int]:
    """Start the fake workers and a router for each name.

    Returns:
        The routers, still starting, and the port of the decode worker.
    """
    p, d = free_port(), free_port()
    fakes = [sys.executable, "-m", f"{_PACKAGE}.fake_worker.paced", str(p), str(d), model]
    workers = launch.start("fake-workers", d, fakes, OTHER_CORE)
    workers.wait_ready("/ready", time.monotonic() + START_S)
    prefill, decode = f"http://127.0.0.1:{p}", f"http://127.0.0.1:{d}"
    candidates: list[Candidate] = []
    for name in names:
        port = free_port()
        if name in FLOORS:
            argv = [*_floor(name, launch.logs), str(port), str(d)]
            argv += [str(p)] if name == "floor_two_legs" else []
            process = launch.start(name, port, argv, ROUTER_CORE)
        elif name in OURS or name in BASELINES.values():
            argv = [
                *(*_python(name, options), "--port", str(port)),
                *("--prefill", prefill, "--decode", decode, "--table", str(TABLE)),
            ]
            if name in PROCESSES:
                file = launch.logs / f"{name}.toml"
                file.write_text(f"processes = {PROCESSES[name]}\nadmin_port = {free_port()}\n")
                argv += ["--config", str(file)]
            if name == "ours_everything":
                argv += ["--config", str(everything.config(launch.logs, f"{decode}/v1/traces"))]
            else:
                argv += ["--log-level", "warning"]  # as the others
            process = launch.start(name, port, argv, ROUTER_CORE)
        else:
            binaries = rival_routers.install(options.rivals)
            process = rival_routers.start(launch, binaries, name, prefill, [decode], ROUTER_CORE)
        candidates.append(Candidate(name, process, int(process.url.rpartition(":")[2])))
    return candidates, d
