"""Workers that something else lists: the pool is brought to what the lists say.

Owns which workers came this way; only those does it drain and let go. It knows nothing of files
or clusters: a source tells which workers there shall be, and is believed until it tells otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import aiohttp

from ppd.contract import Role
from ppd.errors import WorkerError

from ..config.options import RouterConfig
from ..wire.errors import describe
from .handshake import connect_worker
from .kubernetes import Pods
from .registry import WorkerRegistry
from .worker import Worker
from .workers_file import WorkersFile

logger = logging.getLogger("ppd.router.workers")


class Source(Protocol):
    @property
    def name(self) -> str: ...

    async def watch(self, tell: Callable[[Mapping[str, Role]], None]) -> None:
        """Tells the roles of all its workers by URL, at once and whenever they change."""


async def open_sources(config: RouterConfig) -> list[Source]:
    """Raises:
    ConfigError: a source cannot be read.
    """
    sources: list[Source] = []
    if config.workers_file:
        file = WorkersFile(config.workers_file, config.all_roles, config.discovery_interval_s)
        sources.append(file)
    if config.kubernetes is not None:
        sources.append(await Pods.open(config.kubernetes, config.all_roles))
    return sources


async def first_of_each(pool: WorkerRegistry, roles: Collection[Role]) -> None:
    """Wait until there is a worker of each role."""
    while missing := [role for role in roles if not pool.of(role)]:
        logger.info("waiting for a %s worker", " and a ".join(missing))
        pool.joined.clear()
        await pool.joined.wait()


class Reconciler:
    """
    Args:
        interval_s: between two tries to reach those that do not answer, and between two looks
            whether those that shall leave have finished.
    """

    def __init__(self, pool: WorkerRegistry, interval_s: float) -> None:
        self._pool = pool
        self._interval_s = interval_s
        self._wanted: dict[str, Mapping[str, Role]] = {}  # by source
        self._ours: dict[str, Worker] = {}
        self._leaving: dict[str, bool] = {}  # whether operators had drained it before
        self._connecting: set[str] = set()
        self._told: dict[str, str] = {}  # why one does not join, as last logged
        self._woken = asyncio.Event()

    async def run(self, sources: Sequence[Source]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in sources:
                tasks.create_task(source.watch(partial(self.want, source.name)))
            while True:
                self._woken.clear()
                for greeting in self.reconcile():
                    tasks.create_task(greeting)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._woken.wait()

    def want(self, source: str, workers: Mapping[str, Role]) -> None:
        """From now on ``source`` lists these."""
        self._wanted[source] = dict(workers)
        self._woken.set()

    def reconcile(self) -> list[Coroutine[Any, Any, None]]:
        """Drain and let go what is listed no longer; gives the greetings of all that shall come
        or stay after all, each to be awaited in its own time."""
        wanted = self._roles()
        greetings: list[Coroutine[Any, Any, None]] = []
        for url, worker in list(self._ours.items()):
            if self._pool.at(url) is not worker:  # removed by an operator
                self._forget(url)
            elif wanted.get(url) is not worker.role:
                self._see_off(worker)
            elif url in self._leaving:
                self._keep(worker)
                greetings.append(self._pool.check(worker))
        for url in self._told.keys() - wanted.keys():
            del self._told[url]
        for url, role in wanted.items():
            if self._pool.at(url) is None and url not in self._connecting:
                self._connecting.add(url)
                greetings.append(self._meet(url, role))
        return greetings

    def _roles(self) -> dict[str, Role]:
        return {url: role for listed in self._wanted.values() for url, role in listed.items()}

    async def _meet(self, url: str, role: Role) -> None:
        try:
            worker = await connect_worker(self._pool.control, role, url)
            if self._roles().get(url) is not role or self._pool.at(url) is not None:
                return  # no longer listed, or it came another way
            self._pool.join(worker)
        except (aiohttp.ClientError, TimeoutError, OSError, WorkerError) as error:
            why = describe(error)
            if self._told.get(url) != why:
                self._told[url] = why
                logger.warning("worker cannot join yet: %s %s (%s)", role, url, why)
        else:
            self._ours[url] = worker
            self._told.pop(url, None)
            sources = [name for name, listed in self._wanted.items() if url in listed]
            logger.info("worker joined: %s %s (%s)", role, url, ", ".join(sources))
        finally:
            self._connecting.discard(url)

    def _see_off(self, worker: Worker) -> None:
        """No new work for it; when it has finished what it has, it leaves."""
        first = worker.url not in self._leaving
        if first:
            self._leaving[worker.url] = worker.draining
        worker.draining = True  # again, if it has restarted meanwhile
        if not worker.in_flight:
            self._pool.leave(worker)
            self._forget(worker.url)
            logger.info("worker left: %s %s (no longer listed)", worker.role, worker.url)
        elif first:
            logger.info(
                "worker draining: %s %s (no longer listed, %d requests under way)",
                worker.role,
                worker.url,
                worker.in_flight,
            )

    def _keep(self, worker: Worker) -> None:
        """It is listed again before it has left."""
        worker.draining = self._leaving.pop(worker.url)
        worker.alive = False  # until it has said whether it is still the same process
        logger.info("worker resumed: %s %s (listed again)", worker.role, worker.url)

    def _forget(self, url: str) -> None:
        self._ours.pop(url, None)
        self._leaving.pop(url, None)
