"""What the processes on the port ask each other of workers: what these have under way there, and
what operators have changed, which a process that is started again takes up."""

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

from ..peers import Peers, ask
from ..workers.registry import WorkerRegistry
from ..workers.worker import Worker

logger = logging.getLogger("ppd.router.workers")

CHANGES = f"{PATH}/changes"


class Changes(msgspec.Struct):
    """Since the start of the first process, by URL.

    Attributes:
        drained: which processes; None: of a worker that does not tell.
    """

    added: dict[str, Role] = msgspec.field(default_factory=dict)
    removed: set[str] = msgspec.field(default_factory=set)
    drained: dict[str, str | None] = msgspec.field(default_factory=dict)

    def was_added(self, worker: Worker) -> None:
        self.added[worker.url] = worker.role
        self.removed.discard(worker.url)

    def was_removed(self, worker: Worker) -> None:
        self.added.pop(worker.url, None)
        self.drained.pop(worker.url, None)
        self.removed.add(worker.url)

    def was_drained(self, worker: Worker) -> None:
        self.drained[worker.url] = worker.handshake.boot_id

    def was_resumed(self, worker: Worker) -> None:
        self.drained.pop(worker.url, None)

    def shown(self, pool: WorkerRegistry) -> Changes:
        """Less added workers that are lost: nobody shall wait for them."""
        living = {worker.url for worker in pool.workers if worker.alive}
        added = {url: role for url, role in self.added.items() if url in living}
        return Changes(added, self.removed, self.drained)

    def urls(self, role: Role, given: Sequence[str]) -> tuple[str, ...]:
        """Of that role's workers, where the configuration gives these."""
        kept = [url for url in given if url not in self.removed]
        added = [url for url, its in self.added.items() if its is role and url not in kept]
        return (*kept, *added)


async def take_over(control: aiohttp.ClientSession, peers: Peers | None) -> Changes:
    """As another process has them, if one serves already."""
    for url in () if peers is None else peers.urls.values():
        assert peers is not None
        if (told := await ask(control, peers, url, CHANGES)) is not None:
            changes = msgspec.json.decode(told, type=Changes)
            logger.info("taken over from %s: %s", url, changes)
            return changes
    return Changes()


class _Busy(msgspec.Struct):
    url: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class PeerLoads:
    control: aiohttp.ClientSession
    peers: Peers | None

    async def in_flight(self, request: web.Request) -> Counter[str] | None:
        """By URL; nothing if one of them asks; None: one of them does not tell."""
        peers, total = self.peers, Counter[str]()
        if peers is None or peers.asks(request):
            return total
        asked = [ask(self.control, peers, url, PATH) for url in peers.urls.values()]
        for told in await asyncio.gather(*asked):
            if told is None:
                return None
            for one in msgspec.json.decode(told, type=list[_Busy]):
                total[one.url] += one.in_flight
        return total
