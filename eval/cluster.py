"""The process launcher: workers, routers and tools as processes of this machine.

It starts them on free ports, waits for them, keeps their logs and stops them. A process ends with
its launcher, also when the launcher is killed.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ppd.contract import Role
from ppd.errors import PpdError

_PR_SET_PDEATHSIG = 1
_STOP_AFTER_S = 15.0
_CLIENT_S = 900.0  # of a load client, to its end
_MOONCAKE_PORTS = range(15_000, 17_001)  # MC_MIN_PRC_PORT to MC_MAX_PRC_PORT
_NOISE = ("nanobind:", " - leaked", " - ...", "See https://nanobind")


class ClusterError(PpdError):
    """A process did not start, or died."""


class ClientError(PpdError):
    """A load client failed, or reported errors."""


@dataclass(slots=True)
class Process:
    """One process of a cluster, with its log."""

    name: str
    url: str
    log: Path
    popen: subprocess.Popen[bytes]

    def wait_ready(self, path: str, deadline_s: float) -> None:
        """Wait until ``path`` answers 200.

        Raises:
            ClusterError: the process ended, or the deadline (``time.monotonic``) has passed.
        """
        while True:
            try:
                with urllib.request.urlopen(self.url + path, timeout=2.0) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or listening but not ready
            if time.monotonic() > deadline_s:
                raise ClusterError(f"{self.name} is not ready in time{self.tail()}")
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.2)
                raise ClusterError(f"{self.name} {self.ending()}")

    def ending(self) -> str:
        """How it ended, in words, with the end of its log."""
        code = self.popen.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return how + self.tail()

    def tail(self, lines: int = 20) -> str:
        """The end of its log, less the noise that native libraries make on exit."""
        text = self.log.read_text(errors="replace").splitlines()
        last_lines = [line for line in text if not line.startswith(_NOISE)][-lines:]
        return f"; the end of {self.log}:\n  " + "\n  ".join(last_lines)

    def stop(self) -> None:
        """End it in good order; after a while at once, with whatever it started."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(_STOP_AFTER_S)
        with suppress(ProcessLookupError):  # the group is gone: nothing was left behind
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@dataclass(slots=True)
class Launcher:
    """Starts processes whose logs go to one folder; ``stack`` stops them.

    ``environment`` is added to each process's own.
    """

    logs: Path
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)

    def worker(
        self,
        role: Role,
        model: str | Path,
        *flags: str,
        name: str = "",
        core: int | Sequence[int] | None = None,
    ) -> Process:
        """A worker, still starting; on one ``core`` alone, or on some, if given."""
        port = free_port()
        argv = [
            *(script("ppd-worker"), "--role", role.value, "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        if role is Role.PREFILL:
            argv += ["--disaggregation-bootstrap-port", str(free_port())]
        if "--dp-size" not in flags:  # ranks need a port each
            # SGLang before 0.5.23 takes one of the kernel's range, and binds it seconds later.
            argv += ["--nccl-port", str(free_port())]
        return self.start(name or role.value, port, [*argv, *flags], core)

    def router(
        self,
        prefill: Sequence[Process | str],
        decode: Sequence[Process | str],
        *flags: str,
        replica: Sequence[Process | str] = (),
        port: int | None = None,
        name: str = "router",
        command: Sequence[str] = (),
    ) -> Process:
        """A router, still starting; it waits for its workers itself. Workers may be URLs.

        Args:
            command: in place of ``ppd-router``.
        """
        port = port or free_port()
        argv = [*(command or [script("ppd-router")]), "--port", str(port)]
        roles = {Role.PREFILL: prefill, Role.DECODE: decode, Role.REPLICA: replica}
        for role, workers in roles.items():
            if workers:
                argv += [f"--{role.value}", *map(_url, workers)]
        return self.start(name, port, [*argv, *flags])

    def start(
        self, name: str, port: int, argv: Sequence[str], core: int | Sequence[int] | None = None
    ) -> Process:
        """Start any process that will listen on ``port``."""
        log = self.logs / f"{name}-{port}.log"
        log.unlink(missing_ok=True)
        popen = self.spawn(log, argv, core)
        process = Process(name, f"http://127.0.0.1:{port}", log, popen)
        self.started.append(process)
        self.stack.callback(process.stop)
        return process

    def spawn(
        self, log: Path, argv: Sequence[str], core: int | Sequence[int] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process that its caller stops; it dies with us, whatever happens."""
        with log.open("ab") as output:
            return subprocess.Popen(
                argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment},
                preexec_fn=_in_child(core),
            )


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Make a virtual environment with some packages, unless it is there already.

    Returns:
        Its ``bin`` folder.
    """
    done = folder / "installed"
    if not done.exists():
        names = ", ".join(requirements)
        print(f"first run: installing {names} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *requirements], check=True)
        done.touch()
    return folder / "bin"


def run_to_end(argv: Sequence[str], log: Path) -> None:
    """Run a load client to its end.

    Raises:
        ClientError: it failed; the message has the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                argv, stdout=output, stderr=subprocess.STDOUT, timeout=_CLIENT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            message = f"{argv[0]} did not end within {_CLIENT_S:g} s; see {log}"
            raise ClientError(message) from error
    if done.returncode != 0:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
        end = "\n  ".join(text.splitlines()[-15:])
        raise ClientError(f"{argv[0]} ended with {done.returncode}; the end of {log}:\n  {end}")


@contextmanager
def launching(logs: Path) -> Iterator[Launcher]:
    """A launcher whose processes are stopped when the context ends, the newest first."""
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield Launcher(logs, stack)


def wait_all(processes: Sequence[Process], timeout_s: float = 240.0) -> None:
    """Wait until all are ready to serve.

    Raises:
        ClusterError: one did not become ready.
    """
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        path = "/health" if process.name.endswith(("router", "pool")) else "/ready"
        process.wait_ready(path, deadline_s)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free at the moment.

    It is below the range that the kernel gives to clients: a worker takes half a minute to bind
    its port, and any connection made meanwhile could have taken it. Mooncake's transports choose
    ports of their own meanwhile.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # Where the range begins low, what is above it, or in the worst case any port, must do.
    ports = range(10_000, low) or range(high + 1, 65_536) or range(10_000, 65_536)
    while True:
        port = random.choice(ports)
        if port in _MOONCAKE_PORTS:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def require_free(port: int) -> None:
    """Find out before half a minute of starting workers has passed.

    Raises:
        ClusterError: something listens on that port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(f"port {port} cannot be used: {error.strerror}") from error


def gpu_flags(index: int, workers: int) -> list[str]:
    """Return SGLang flags that share this machine's GPUs among ``workers`` servers.

    Empty on a machine without GPU.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return []
    on_one_gpu = -(-workers // gpus)
    fraction = f"{0.85 / on_one_gpu:.2f}"
    return ["--base-gpu-id", str(index % gpus), "--mem-fraction-static", fraction]


def share_flags(index: int, workers: int, busy: int | None = None) -> list[str]:
    """Return ``ppd-worker`` flags that share this machine among ``workers`` of them.

    They share the GPUs; on a machine without GPU, the cores. Where all workers together have more
    OpenMP threads than there are cores, threads that spin hold up those that compute. A worker
    that is pinned to one core needs no flag: it takes one thread.

    Args:
        busy: how many workers compute at a time at most, if not all.
    """
    return gpu_flags(index, workers) or ["--cpu-threads", str(core_share(busy or workers))]


def core_share(workers: int) -> int:
    """Return how many cores each of ``workers`` gets of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _url(worker: Process | str) -> str:
    return worker if isinstance(worker, str) else worker.url


def script(name: str) -> str:
    """Return the path of a console script of the environment that runs this process."""
    return str(Path(sys.executable).with_name(name))


def _in_child(core: int | Sequence[int] | None) -> Callable[[], None]:
    own = [core] if isinstance(core, int) else core
    libc = ctypes.CDLL(None)  # loaded here: the child must not import between fork and exec

    def settle_in() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # it dies with us
        if own is not None:
            os.sched_setaffinity(0, own)

    return settle_in
