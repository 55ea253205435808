"""Discovery: the registry follows the workers that sources list.

Owns the workers that joined in this way, and drains and removes only those. A source is a file or
a cluster. What it lists holds until it lists other workers.
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
from .handshake import connect_server
from .kubernetes import Pods
from .registry import WorkerRegistry
from .worker import Server
from .workers_file import WorkersFile

logger = logging.getLogger("ppd.router.workers")


class Source(Protocol):
    """A source of workers."""

    @property
    def name(self) -> str:
        """The name of the source, for logs."""
        ...

    async def watch(self, publish: Callable[[Mapping[str, Role]], None]) -> None:
        """Call ``publish`` with the roles of all workers by URL, at once and on every change."""


async def open_sources(config: RouterConfig) -> list[Source]:
    """The sources that the configuration names.

    Raises:
        ConfigError: a source cannot be read.
    """
    sources: list[Source] = []
    if config.workers_file:
        file = WorkersFile(config.workers_file, config.all_roles, config.discovery_interval_s)
        sources.append(file)
    if config.kubernetes is not None:
        sources.append(await Pods.open(config.kubernetes, config.all_roles))
    return sources


async def first_of_each(registry: WorkerRegistry, roles: Collection[Role]) -> None:
    """Wait until the registry has a worker of each role, of one and the same model."""
    while missing := registry.lacks(roles):
        logger.info("waiting for a %s worker", " and a ".join(missing))
        registry.join_event.clear()
        await registry.join_event.wait()


class Reconciler:
    """Adds listed workers to the registry, and drains and removes those no longer listed.

    Args:
        registry: the workers of the router.
        interval_s: seconds between two handshakes with a listed worker that does not answer, and
            between two checks whether a draining worker has finished.
    """

    def __init__(self, registry: WorkerRegistry, interval_s: float) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._listed: dict[str, Mapping[str, Role]] = {}  # by source
        self._joined: dict[str, Server] = {}  # by URL, the servers that joined in this way
        self._connecting: set[str] = set()
        self._join_errors: dict[str, str] = {}  # by URL, as last logged
        self._change_event = asyncio.Event()

    async def run(self, sources: Sequence[Source]) -> None:
        """Follow the sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in sources:
                tasks.create_task(source.watch(partial(self.update, source.name)))
            while True:
                self._change_event.clear()
                for handshake in self.reconcile():
                    tasks.create_task(handshake)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._change_event.wait()

    def update(self, source: str, workers: Mapping[str, Role]) -> None:
        """Record what a source lists from now on: roles by URL."""
        self._listed[source] = dict(workers)
        self._change_event.set()

    def reconcile(self) -> list[Coroutine[Any, Any, None]]:
        """Drain and remove workers that are no longer listed.

        Returns:
            Handshakes with the workers that join or stay, to be awaited concurrently.
        """
        listed = self._roles()
        handshakes: list[Coroutine[Any, Any, None]] = []
        for url, server in list(self._joined.items()):
            if self._registry.at(url) is not server:  # removed by an operator
                del self._joined[url]
            elif listed.get(url) is not server.role:
                self._drain(server)
            elif server.leaving:
                self._resume(server)
                handshakes.append(self._registry.check(server))
        for url in self._join_errors.keys() - listed.keys():
            del self._join_errors[url]
        for url, role in listed.items():
            if self._registry.at(url) is None and url not in self._connecting:
                self._connecting.add(url)
                handshakes.append(self._add(url, role))
        return handshakes

    def _roles(self) -> dict[str, Role]:
        return {url: role for workers in self._listed.values() for url, role in workers.items()}

    async def _add(self, url: str, role: Role) -> None:
        """Perform the handshake with a listed worker, and add it to the registry."""
        try:
            server = await connect_server(self._registry.control, role, url)
            if self._roles().get(url) is not role or self._registry.at(url) is not None:
                return  # it is no longer listed, or joined in another way meanwhile
            self._registry.join(server)
        except (aiohttp.ClientError, TimeoutError, OSError, WorkerError) as error:
            reason = describe(error)
            if self._join_errors.get(url) != reason:
                self._join_errors[url] = reason
                logger.warning("worker cannot join yet: %s %s (%s)", role, url, reason)
        else:
            self._joined[url] = server
            self._join_errors.pop(url, None)
            sources = [name for name, workers in self._listed.items() if url in workers]
            logger.info("worker joined: %s %s (%s)", role, url, ", ".join(sources))
        finally:
            self._connecting.discard(url)

    def _drain(self, server: Server) -> None:
        """Drain a worker, and remove it if it has finished its requests."""
        first = not server.leaving
        server.leaving = True
        if not server.in_flight:
            self._registry.leave(server, stays_drained=True)
            del self._joined[server.url]
            logger.info("worker left: %s %s (no longer listed)", server.role, server.url)
        elif first:
            logger.info(
                "worker draining: %s %s (no longer listed, %d requests under way)",
                server.role,
                server.url,
                server.in_flight,
            )

    def _resume(self, server: Server) -> None:
        """Let a worker stay that is listed again; a handshake must revive it."""
        server.leaving = False
        server.alive = False  # its process may be another one
        logger.info("worker resumed: %s %s (listed again)", server.role, server.url)
