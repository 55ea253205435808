"""A server and its ranks: what the router knows of each.

A server with data parallelism has several ranks behind one URL. Each has a scheduler and a radix
cache of its own, so each is a worker: a home of sessions, with its own load and circuit breaker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from ppd.announcement import Announcement
from ppd.contract import Role
from ppd.evictions import Evictions
from ppd.headroom import Headroom

from .breaker import Breaker
from .sglang import Handshake, Load

logger = logging.getLogger("ppd.router.workers")


@dataclass(slots=True, eq=False)
class Server:
    """One server behind a URL.

    Attributes:
        url: base URL, without a path.
        role: the role that the router was given for it.
        handshake: its properties, by the last handshake.
        alive: whether it answered its last health check.
        draining: whether an operator has drained it: it gets no new work until it is resumed.
        leaving: whether discovery lists it no longer: it gets no new work, and is removed when its
            requests have ended.
        epoch: number of its restarts that the router has seen.
        announced_at_s: when it last announced itself; None if it was given, added or discovered.
        announcement: its last announcement.
        ranks: its workers, by their rank.
        bootstrap_host: the host at which decode workers reach its bootstrap server.
    """

    url: str
    role: Role
    handshake: Handshake
    alive: bool = True
    draining: bool = False
    leaving: bool = False
    epoch: int = 0
    announced_at_s: float | None = None
    announcement: Announcement | None = None
    ranks: list[Worker] = field(init=False)
    bootstrap_host: str = field(init=False)

    def __post_init__(self) -> None:
        host = urlsplit(self.url).hostname
        assert host is not None, "RouterConfig.check admits no URL without a host"
        self.bootstrap_host = host
        self.ranks = []
        self.ranks += (Worker(self, rank) for rank in range(self.handshake.dp_size))

    @property
    def id(self) -> str:
        """Host and port, as operators name the server."""
        return urlsplit(self.url).netloc

    @property
    def in_flight(self) -> int:
        """Open legs of all ranks."""
        return sum(worker.in_flight for worker in self.ranks)

    @property
    def announces_load(self) -> bool:
        """Whether its last announcement has the load of each of its ranks."""
        announcement = self.announcement
        return announcement is not None and len(announcement.loads_of_ranks) == len(self.ranks)

    def revive(self, handshake: Handshake, *, restarted: bool) -> list[Worker]:
        """Mark a server alive that was down, with the properties of a new handshake.

        Args:
            handshake: the properties; the number of ranks may be another one.
            restarted: whether another process runs at its URL.

        Returns:
            The ranks that it did not have before.
        """
        self.handshake, self.alive = handshake, True
        self.draining = self.draining and not restarted
        self.epoch += restarted
        del self.ranks[handshake.dp_size :]
        for worker in self.ranks:
            worker.load = None
            worker.update_names()
        begun = [Worker(self, rank) for rank in range(len(self.ranks), handshake.dp_size)]
        self.ranks += begun
        return begun

    def note_flushes(self, flushes: int | None) -> None:
        """Record how often the server has flushed its cache; a flush is one of all ranks.

        A higher count than before changes the identity of its workers: their sessions' KV is gone.

        Args:
            flushes: the count; None if it was not reported.
        """
        if flushes is not None and flushes > self.handshake.flushes:
            logger.info("%s has flushed its KV cache", self.url)
            self.handshake = replace(self.handshake, flushes=flushes)
            for worker in self.ranks:
                worker.update_names()


@dataclass(slots=True, eq=False)
class Worker:
    """One rank of a server, or a server without data parallelism; a ``ppd.placement.WorkerView``.

    Attributes:
        server: whose rank it is.
        rank: of data parallelism.
        in_flight: open legs.
        streams: open legs whose responses are streamed.
        load: its last report of load; None without one.
        evictions: what its cache has evicted, by its KV events; None without them.
        publishes: whether its KV events arrive; None without a subscription.
        breaker: the circuit breaker of its requests.
        headroom: the KV that it has left.
        role: role of the server.
        name: URL, and the rank where there are several; what placement hashes and metrics show.
        identity: its process and KV cache, as sessions store them. It changes with a restart and
            with a flush, because both lose the KV. A worker that left and came back keeps it.
    """

    server: Server
    rank: int = 0
    in_flight: int = 0
    streams: int = 0
    load: Load | None = None
    evictions: Evictions | None = None
    publishes: bool | None = None
    breaker: Breaker = field(default_factory=Breaker)
    headroom: Headroom = field(default_factory=Headroom)
    role: Role = field(init=False)
    name: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.role = self.server.role
        self.update_names()

    def update_names(self) -> None:
        """Compute name and identity again."""
        # Stored rather than computed: all turns of the index share the one string.
        self.name = self.url + self._suffix
        process = self.handshake.boot_id or self.server.epoch
        self.identity = f"{self.name}#{process}.{self.handshake.flushes}"

    # -- of the server -------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self.server.url

    @property
    def handshake(self) -> Handshake:
        """Properties of the server."""
        return self.server.handshake

    @property
    def alive(self) -> bool:
        """Whether the server answered its last health check."""
        return self.server.alive

    @property
    def draining(self) -> bool:
        """Whether the server gets no new work: it is drained, or leaving."""
        return self.server.draining or self.server.leaving

    @property
    def id(self) -> str:
        """Host and port, and the rank where there are several; as operators name the worker."""
        return self.server.id + self._suffix

    @property
    def has_peers(self) -> bool:
        """Whether its server has other ranks."""
        return self.handshake.dp_size > 1

    @property
    def _suffix(self) -> str:
        return f"@{self.rank}" if self.has_peers else ""

    @property
    def ready(self) -> bool:
        """Whether the worker may be given work."""
        return self.alive and not self.draining and self.breaker.admits

    # -- ppd.placement.WorkerView --------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that decode on the worker.

        Requests whose responses are not streamed are counted in the worker's own report only.
        """
        return max(self.streams, 0 if self.load is None else self.load.running)

    @property
    def takes_appends(self) -> bool:
        """Whether the worker takes local turns."""
        return self.handshake.local_prefill

    @property
    def page_size(self) -> int:
        """Tokens of a page of its KV cache."""
        return self.handshake.page_size

    def has_room(self, tokens: int) -> bool:
        """Whether the worker has KV for ``tokens`` tokens, by its reports.

        True for an idle worker: a request that is too long for it is left to the engine to refuse.
        """
        left = self.headroom.left_tokens
        return left is None or tokens <= left or self.in_flight == 0

    def evicted_tokens(self, session: int) -> int:
        """Tokens that the worker has evicted from a conversation's end, by its KV events."""
        return 0 if self.evictions is None else self.evictions.lost(session)
