"""What is done to the workers of ``load-router`` while they serve: a seeded schedule.

Killed and started again, stopped and continued, cut off from the network, drained by the router
and resumed: one or several at a time, now and then all of one role.
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
from .account import Event, Trouble

_START_S = 30.0
_WEIGHTS = {Trouble.KILL: 4, Trouble.STOP: 3, Trouble.FLAP: 3, Trouble.DRAIN: 3}
_WHOLE_ROLE = 0.06  # of all troubles
_BAD = (" ERROR ", " CRITICAL ", "Traceback", "was never", "Unclosed")


@dataclass(slots=True)
class Slot:
    """A worker that may be killed: its port stays, its process does not."""

    role: str
    port: int
    popen: subprocess.Popen[bytes] | None = None
    drained_since_s: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(slots=True)
class Workers:
    launch: Launcher
    model: str
    slots: list[Slot] = field(default_factory=list)

    def add(self, role: str) -> None:
        slot = Slot(role, free_port())
        self.slots.append(slot)
        self.launch.stack.callback(self.kill, slot)
        self.start(slot)

    def of(self, role: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.role == role]

    def start(self, slot: Slot) -> None:
        log = self.launch.logs / f"load-{slot.role}-{slot.port}.log"
        module = f"{__package__.removesuffix('.unrest')}.fake_worker"
        argv = [sys.executable, "-m", module, slot.role, str(slot.port), self.model]
        slot.popen = self.launch.spawn(log, argv)

    def kill(self, slot: Slot) -> None:
        if slot.popen is not None:
            with suppress(ProcessLookupError):
                os.kill(slot.popen.pid, signal.SIGKILL)
            slot.popen.wait()  # at once, and its number is not given away before
            slot.popen = None

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        assert slot.popen is not None
        os.kill(slot.popen.pid, number)

    def drained_since(self, port: int) -> float | None:
        return next((s.drained_since_s for s in self.slots if s.port == port), None)


async def until_listening(slot: Slot) -> None:
    """Raises: ClusterError."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", slot.port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise ClusterError(f"the {slot.role} worker on port {slot.port} does not listen")


class Unrest:
    def __init__(
        self, workers: Workers, router: str, http: aiohttp.ClientSession, source: random.Random
    ) -> None:
        self.events: list[Event] = []
        self._workers = workers
        self._router = router
        self._http = http
        self._source = source
        self._calm_until_s = self._calm_since_s = time.monotonic()
        self._under_way = False

    def calm_for(self, seconds: float) -> bool:
        now_s = time.monotonic()
        settled = now_s > self._calm_since_s + 0.2
        return not self._under_way and settled and now_s + seconds < self._calm_until_s

    async def run(self, until: asyncio.Event) -> None:
        """One trouble after the other until then; all are over when this returns."""
        while not until.is_set():
            calms_s = (0.05, 0.3, 2.0) if self.events else (0.05,)  # a short run has some, too
            calm_s = self._source.choice(calms_s)
            self._calm_since_s = time.monotonic()
            self._calm_until_s = self._calm_since_s + calm_s
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), calm_s)
                return
            self._under_way = True
            await asyncio.gather(*(self._trouble(slot) for slot in self._chosen()))
            self._under_way = False

    def _chosen(self) -> Sequence[Slot]:
        source, workers = self._source, self._workers
        if source.random() < _WHOLE_ROLE:
            return workers.of(source.choice(("prefill", "decode")))
        return source.sample(workers.slots, source.choice((1, 1, 2, 3)))

    async def _trouble(self, slot: Slot) -> None:
        trouble = self._source.choices([*_WEIGHTS], weights=[*_WEIGHTS.values()])[0]
        event = Event(slot.role, slot.url, trouble, time.monotonic())
        self.events.append(event)
        match trouble:
            case Trouble.KILL:
                await self._kill(slot)
            case Trouble.STOP:
                await self._stop(slot)
            case Trouble.FLAP:
                await self._flap(slot)
            case Trouble.DRAIN:
                await self._drain(slot)
        event.over_s = time.monotonic()

    async def _kill(self, slot: Slot) -> None:
        for _ in range(self._source.choice((1, 1, 3))):
            self._workers.kill(slot)
            await asyncio.sleep(self._source.uniform(0.0, 1.0))
            self._workers.start(slot)
            await until_listening(slot)

    async def _stop(self, slot: Slot) -> None:
        self._workers.signal(slot, signal.SIGSTOP)
        await asyncio.sleep(self._source.choice((0.1, 0.3, 0.3, 1.0, 1.0, 4.0)))
        self._workers.signal(slot, signal.SIGCONT)

    async def _flap(self, slot: Slot) -> None:
        for _ in range(self._source.choice((1, 3))):
            down_s = self._source.uniform(0.02, 0.5)
            async with self._http.post(slot.url + FLAP, json={"down_s": down_s}) as answer:
                await answer.read()
            await asyncio.sleep(0.02 + down_s)
            await until_listening(slot)

    async def _drain(self, slot: Slot) -> None:
        await self._order(slot, "drain")
        slot.drained_since_s = time.monotonic()
        await asyncio.sleep(self._source.uniform(0.2, 2.0))
        slot.drained_since_s = None
        await self._order(slot, "resume")

    async def _order(self, slot: Slot, what: str) -> None:
        url = f"{self._router}/workers/127.0.0.1:{slot.port}/{what}"
        async with self._http.post(url) as answer:
            if answer.status != 200:
                raise ClusterError(f"{url} answered {answer.status}: {await answer.text()}")


def log_lines(log: Path, known: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """How many errors of each known kind a router has logged, and all the others."""
    counted, others = Counter[str](), list[str]()
    for line in log.read_text(errors="replace").splitlines():
        kind = next((mark for mark in known if mark in line), None)
        if any(mark in line for mark in _BAD):
            if kind is None:
                others.append(line)
            else:
                counted[kind] += 1
    return counted, others
