"""State of workers that router processes on one port fetch from each other.

It consists of the requests in flight to each worker, and of the operators' changes. A restarted
process applies these changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from ppd.announcement import PATH
from ppd.contract import Role

from ..peers import Peers, fetch
from ..workers.registry import WorkerRegistry
from ..workers.worker import Server

logger = logging.getLogger("ppd.router.workers")

CHANGES_PATH = f"{PATH}/changes"


class WorkerChanges(msgspec.Struct):
    """The operators' changes of workers since the start of the first process.

    Attributes:
        added: role by URL.
        removed: URLs.
        drained: boot id by URL of the workers' processes; None: the worker reports none.
    """

    added: dict[str, Role] = msgspec.field(default_factory=dict)
    removed: set[str] = msgspec.field(default_factory=set)
    drained: dict[str, str | None] = msgspec.field(default_factory=dict)

    def record_added(self, server: Server) -> None:
        """Record that an operator has added a worker."""
        self.added[server.url] = server.role
        self.removed.discard(server.url)

    def record_removed(self, server: Server) -> None:
        """Record that an operator has removed a worker."""
        self.added.pop(server.url, None)
        self.drained.pop(server.url, None)
        self.removed.add(server.url)

    def record_drained(self, server: Server) -> None:
        """Record that an operator has drained a worker."""
        self.drained[server.url] = server.handshake.boot_id

    def record_resumed(self, server: Server) -> None:
        """Record that an operator has resumed a drained worker."""
        self.drained.pop(server.url, None)

    def without_lost(self, registry: WorkerRegistry) -> WorkerChanges:
        """Return the changes that a restarted process has to apply.

        It would wait for added workers that are not alive. A drain has ended if the worker is no
        longer draining: its process was another one then.
        """
        living = {server.url for server in registry.servers if server.alive}
        added = {url: role for url, role in self.added.items() if url in living}
        resumed = {server.url for server in registry.servers if not server.draining}
        drained = {url: boot_id for url, boot_id in self.drained.items() if url not in resumed}
        return WorkerChanges(added, self.removed, drained)

    def urls(self, role: Role, configured: Sequence[str]) -> tuple[str, ...]:
        """Return the URLs of a role's workers after the changes.

        Args:
            role: of the workers.
            configured: their URLs before the changes.
        """
        kept = [url for url in configured if url not in self.removed]
        added = [
            url for url, added_role in self.added.items() if added_role is role and url not in kept
        ]
        return (*kept, *added)


async def fetch_changes(control: aiohttp.ClientSession, peers: Peers | None) -> WorkerChanges:
    """Return the changes of the first peer that responds; no changes if none does."""
    for url in () if peers is None else peers.urls.values():
        assert peers is not None
        if (response := await fetch(control, peers, url, CHANGES_PATH)) is not None:
            changes = msgspec.json.decode(response, type=WorkerChanges)
            logger.info("changes of workers taken from %s: %s", url, changes)
            return changes
    return WorkerChanges()


class _WorkerLoad(msgspec.Struct):
    id: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class PeerLoads:
    """The requests in flight of the other router processes on the port.

    Attributes:
        control: client session for the requests to peers.
        peers: None if this process is the only one.
    """

    control: aiohttp.ClientSession
    peers: Peers | None

    async def in_flight(self, request: web.Request) -> Counter[str] | None:
        """Return the requests in flight of the peers, by worker; None if a peer fails.

        The result is empty if ``request`` is a peer's own.
        """
        peers, total = self.peers, Counter[str]()
        if peers is None or peers.asks(request):
            return total
        fetches = [fetch(self.control, peers, url, PATH) for url in peers.urls.values()]
        for response in await asyncio.gather(*fetches):
            if response is None:
                return None
            for load in msgspec.json.decode(response, type=list[_WorkerLoad]):
                total[load.id] += load.in_flight
        return total
