"""What is done to the workers of a chaos run while they serve: a seeded schedule.

They are killed and started again, stopped and continued, cut off from the network, drained by the
router and resumed: one or several at a time, now and then all of one role.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ..cluster import ClusterError, Launcher, free_port
from ..fake_worker.worker import FLAP
from .accounting import Disruption, Injection

_PACKAGE = __package__.removesuffix(".chaos")
_START_S = 30.0
_WEIGHTS = {Disruption.KILL: 4, Disruption.STOP: 3, Disruption.FLAP: 3, Disruption.DRAIN: 3}
_WHOLE_ROLE = 0.06  # of all disruptions
_BAD_LINES = (" ERROR ", " CRITICAL ", "Traceback", "was never", "Unclosed")


@dataclass(slots=True)
class WorkerSlot:
    """A worker's role and port; its process may be killed and started again."""

    role: str
    port: int
    popen: subprocess.Popen[bytes] | None = None
    drained_since_s: float | None = None

    @property
    def url(self) -> str:
        """The base URL of the worker."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(slots=True)
class WorkerProcesses:
    """The workers of a run, each a process behind a fixed port."""

    launch: Launcher
    model: str
    slots: list[WorkerSlot] = field(default_factory=list)

    def add(self, role: str) -> None:
        """Start one more worker."""
        slot = WorkerSlot(role, free_port())
        self.slots.append(slot)
        self.launch.stack.callback(self.kill, slot)
        self.start(slot)

    def of(self, role: str) -> list[WorkerSlot]:
        """Return the workers of a role."""
        return [slot for slot in self.slots if slot.role == role]

    def start(self, slot: WorkerSlot) -> None:
        """Start a process for a slot that has none."""
        log = self.launch.logs / f"load-{slot.role}-{slot.port}.log"
        module = f"{_PACKAGE}.fake_worker"
        argv = [sys.executable, "-m", module, slot.role, str(slot.port), self.model]
        slot.popen = self.launch.spawn(log, argv)

    def kill(self, slot: WorkerSlot) -> None:
        """Kill the process of a slot, if it has one."""
        if slot.popen is not None:
            with suppress(ProcessLookupError):
                os.kill(slot.popen.pid, signal.SIGKILL)
            slot.popen.wait()  # at once, and its number is not given away before
            slot.popen = None

    def signal(self, slot: WorkerSlot, number: signal.Signals) -> None:
        """Send a signal to the process of a slot."""
        assert slot.popen is not None
        os.kill(slot.popen.pid, number)

    def drained_since(self, port: int) -> float | None:
        """Return since when the worker on a port is drained; None if it is not."""
        return next((s.drained_since_s for s in self.slots if s.port == port), None)


async def wait_until_listening(slot: WorkerSlot) -> None:
    """Wait until a worker accepts connections.

    Raises:
        ClusterError: it does not, within half a minute.
    """
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", slot.port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise ClusterError(f"the {slot.role} worker on port {slot.port} does not listen")


class ChaosSchedule:
    """Disrupts workers at random, with calm times between.

    Args:
        router: its URL, for drains.

    Attributes:
        injections: the disruptions so far.
    """

    def __init__(
        self,
        workers: WorkerProcesses,
        router: str,
        http: aiohttp.ClientSession,
        source: random.Random,
    ) -> None:
        self.injections: list[Injection] = []
        self._workers = workers
        self._router = router
        self._http = http
        self._source = source
        self._calm_until_s = self._calm_since_s = time.monotonic()
        self._under_way = False

    def calm_for(self, seconds: float) -> bool:
        """Return whether no worker is disrupted now or in the next seconds."""
        now_s = time.monotonic()
        settled = now_s > self._calm_since_s + 0.2
        return not self._under_way and settled and now_s + seconds < self._calm_until_s

    async def run(self, until: asyncio.Event) -> None:
        """Disrupt workers until ``until`` is set; all disruptions are over when this returns."""
        while not until.is_set():
            calms_s = (0.05, 0.3, 2.0) if self.injections else (0.05,)  # a short run has some, too
            calm_s = self._source.choice(calms_s)
            self._calm_since_s = time.monotonic()
            self._calm_until_s = self._calm_since_s + calm_s
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), calm_s)
                return
            self._under_way = True
            await asyncio.gather(*(self._disrupt(slot) for slot in self._chosen()))
            self._under_way = False

    def _chosen(self) -> Sequence[WorkerSlot]:
        source, workers = self._source, self._workers
        if source.random() < _WHOLE_ROLE:
            return workers.of(source.choice(("prefill", "decode")))
        return source.sample(workers.slots, source.choice((1, 1, 2, 3)))

    async def _disrupt(self, slot: WorkerSlot) -> None:
        disruption = self._source.choices([*_WEIGHTS], weights=[*_WEIGHTS.values()])[0]
        event = Injection(slot.role, slot.url, disruption, time.monotonic())
        self.injections.append(event)
        match disruption:
            case Disruption.KILL:
                await self._kill(slot)
            case Disruption.STOP:
                await self._stop(slot)
            case Disruption.FLAP:
                await self._flap(slot)
            case Disruption.DRAIN:
                await self._drain(slot)
        event.over_s = time.monotonic()

    async def _kill(self, slot: WorkerSlot) -> None:
        for _ in range(self._source.choice((1, 1, 3))):
            self._workers.kill(slot)
            await asyncio.sleep(self._source.uniform(0.0, 1.0))
            self._workers.start(slot)
            await wait_until_listening(slot)

    async def _stop(self, slot: WorkerSlot) -> None:
        self._workers.signal(slot, signal.SIGSTOP)
        await asyncio.sleep(self._source.choice((0.1, 0.3, 0.3, 1.0, 1.0, 4.0)))
        self._workers.signal(slot, signal.SIGCONT)

    async def _flap(self, slot: WorkerSlot) -> None:
        for _ in range(self._source.choice((1, 3))):
            down_s = self._source.uniform(0.02, 0.5)
            async with self._http.post(slot.url + FLAP, json={"down_s": down_s}) as answer:
                await answer.read()
            await asyncio.sleep(0.02 + down_s)
            await wait_until_listening(slot)

    async def _drain(self, slot: WorkerSlot) -> None:
        await self._order(slot, "drain")
        slot.drained_since_s = time.monotonic()
        await asyncio.sleep(self._source.uniform(0.2, 2.0))
        slot.drained_since_s = None
        await self._order(slot, "resume")

    async def _order(self, slot: WorkerSlot, what: str) -> None:
        url = f"{self._router}/workers/127.0.0.1:{slot.port}/{what}"
        async with self._http.post(url) as answer:
            if answer.status != 200:
                raise ClusterError(f"{url} answered {answer.status}: {await answer.text()}")


def log_lines(log: Path, known: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """Count the errors of each known kind in a router's log, and return all others."""
    counted, others = Counter[str](), list[str]()
    for line in log.read_text(errors="replace").splitlines():
        kind = next((mark for mark in known if mark in line), None)
        if any(mark in line for mark in _BAD_LINES):
            if kind is None:
                others.append(line)
            else:
                counted[kind] += 1
    return counted, others
