"""Real SGLang workers on the CPU of this machine, and what tests read from them.

An idle engine checks its memory pools and exits on a leak. A worker that still serves at the end
of a test has therefore not leaked; ``Workers.settle`` waits for that moment.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from eval import tiny_model
from eval.cluster import Launcher, Process, launching, wait_all
from eval.tiny_model import ModelSpec
from ppd.contract import Role
from ppd.decision import Policy
from router.config.limits import AdmissionLimits
from router.config.options import RouterConfig
from router.server.run import running

_POLL_S = 0.01  # between two queries, so that the queries leave the cores to the workers
_READY_TIMEOUT_S = 600.0  # of a start: only a hang takes that long
_ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    # Workers outnumber the cores: threads of one forward would wait for those of another.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Workers:
    """A prefill worker, a decode worker and a monolithic server of one model.

    Attributes:
        monolithic: None where no test compares with it.
        page_size: tokens of a KV page, the same on all workers.
        model: folder of the model.
    """

    prefill: Process
    decode: Process
    monolithic: Process | None
    page_size: int
    model: Path

    @asynccontextmanager
    async def routed(self, policy: Policy) -> AsyncIterator[str]:
        """Run a router in this process in front of these workers; gives its URL."""
        config = RouterConfig(
            prefill=(self.prefill.url,),
            decode=(self.decode.url,),
            port=0,
            # Else the router would keep from the engine the shortages that are tested here.
            admission=AdmissionLimits(kv_headroom=False),
        )
        async with running(config, policy) as url:
            yield url

    async def settle(self, http: aiohttp.ClientSession) -> None:
        """Wait until all workers are idle, and empty their caches.

        A server empties its cache only when all its queues are empty. Its pools must be full
        then.

        Raises:
            AssertionError: a worker ended.
        """
        for worker in (self.prefill, self.decode, self.monolithic):
            if worker is None:
                continue
            await wait_until(partial(_flush_cache, http, worker))
            await wait_until(partial(_holds_no_kv, http, worker))


def require_alive(worker: Process) -> None:
    """Fail with the end of the worker's log if the worker has ended.

    Raises:
        AssertionError: the worker ended.
    """
    assert worker.popen.poll() is None, f"{worker.name} died{worker.tail()}"


async def _flush_cache(http: aiohttp.ClientSession, worker: Process) -> bool:
    require_alive(worker)
    async with http.post(f"{worker.url}/flush_cache") as response:
        return response.status == 200


async def _holds_no_kv(http: aiohttp.ClientSession, worker: Process) -> bool:
    """Whether the load shows empty pools; the engine publishes it one step after a flush."""
    require_alive(worker)
    return not any(load["num_used_tokens"] for load in await loads_of(http, worker))


async def load_of(http: aiohttp.ClientSession, worker: Process) -> dict[str, Any]:
    """Read the load of a worker's only rank, as SGLang publishes it."""
    (load,) = await loads_of(http, worker)
    return load


async def loads_of(http: aiohttp.ClientSession, worker: Process) -> list[dict[str, Any]]:
    """Read the load of each of a worker's ranks, as SGLang publishes it."""
    async with http.get(f"{worker.url}/v1/loads") as response:
        loads: list[dict[str, Any]] = (await response.json())["loads"]
    return loads


async def queues_of(http: aiohttp.ClientSession, worker: Process) -> dict[str, int]:
    """Read how many requests wait in each of SGLang's queues of a decode worker."""
    queues: dict[str, int] = (await load_of(http, worker))["disaggregation"]
    return queues


async def plugin_state(http: aiohttp.ClientSession, worker: Process) -> dict[str, Any]:
    """Read the plugin's state and counters of a worker of one rank."""
    (state,) = await plugin_states(http, worker)
    return state


async def plugin_states(http: aiohttp.ClientSession, worker: Process) -> list[dict[str, Any]]:
    """Read the plugin's state and counters of each of a worker's ranks, in no order."""
    async with http.get(f"{worker.url}/server_info") as response:
        return [state["ppd"] for state in (await response.json())["internal_states"]]


async def metric(http: aiohttp.ClientSession, url: str, series: str) -> float:
    """Read one series of a Prometheus endpoint, named with its labels; 0 if it is absent."""
    async with http.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(series + " "):
                return float(line.split()[-1])
    return 0.0


def log_size(worker: Process) -> int:
    """Read how many bytes a worker's log has."""
    return worker.log.stat().st_size


def log_after(worker: Process, start: int) -> str:
    """Read a worker's log from a position in bytes."""
    with worker.log.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


async def wait_until(
    condition: Callable[[], Awaitable[bool]], *requests: asyncio.Task[Any]
) -> None:
    """Query a condition again and again until it holds.

    Raises:
        AssertionError: one of the requests ended before that.
    """
    while not await condition():
        assert not any(request.done() for request in requests), "a request ended too early"
        await asyncio.sleep(_POLL_S)


@contextmanager
def worker_launcher(logs: Path) -> Iterator[Launcher]:
    """Give a launcher with the environment of test workers; stop its workers at the end."""
    with launching(logs) as launcher:
        launcher.environment |= _ENVIRONMENT
        yield launcher
        begin_stop(launcher.started)


def begin_stop(processes: Sequence[Process]) -> None:
    """Send SIGTERM to processes without waiting for their end.

    SGLang takes five seconds to end, idle for the most part. The launcher waits for all of its
    processes when it closes.
    """
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGTERM)


def wait_ready(*processes: Process) -> None:
    """Wait until all processes serve.

    Raises:
        ClusterError: one of them ended, or takes too long.
    """
    wait_all(processes, _READY_TIMEOUT_S)


@contextmanager
def extra_environment(launcher: Launcher, variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment of the workers that are started in the context."""
    before = launcher.environment
    launcher.environment = {**before, **variables}
    try:
        yield
    finally:
        launcher.environment = before


def start_decode(
    workers: Workers,
    launcher: Launcher,
    name: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a decode worker of the model and page size of ``workers``, and wait until it serves.

    Args:
        name: of its log.
        flags: added to those of its role.
        environment: added to the launcher's.
    """
    page = ("--page-size", str(workers.page_size))
    with extra_environment(launcher, environment or {}):
        decode = launcher.worker(Role.DECODE, workers.model, *page, *flags, name=name)
    wait_ready(decode)
    return decode


def start_cluster(
    spec: ModelSpec,
    logs: Path,
    page_size: int,
    *,
    monolithic: bool,
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    decode_environment: Mapping[str, str] | None = None,
) -> Iterator[Workers]:
    """Start the workers of a model, and stop them when the generator is closed."""
    model = tiny_model.ensure(spec)
    with worker_launcher(logs) as launcher:
        flags = ("--page-size", str(page_size))
        prefill = launcher.worker(Role.PREFILL, model, *flags, *prefill_flags)
        with extra_environment(launcher, decode_environment or {}):
            decode = launcher.worker(Role.DECODE, model, *flags, *decode_flags)
        replica = launcher.worker(Role.REPLICA, model, *flags) if monolithic else None
        wait_ready(*launcher.started)
        yield Workers(prefill, decode, replica, page_size, model)
