"""One worker, as the router sees it."""

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
class Worker:
    """One worker process behind a URL; a ``ppd.placement.WorkerView``.

    Attributes:
        alive: it answered its last probe.
        draining: it gets no new work; its process is to end, or to be resumed.
        epoch: counts its restarts as seen from here.
        in_flight: open legs.
        streams: those of them that stream.
        load: its last report.
        announced_at_s: when it last announced itself; None if it was given, added or discovered.
        announcement: the last one.
        evictions: what its cache has dropped, by its KV events; None without them.
        publishes: whether its KV events arrive; None: there is no subscriber.
        breaker: opens when its requests fail though it is alive.
        headroom: KV that it has left.
        identity: its process and KV cache, as sessions remember them. It changes with a restart
            and with a flush, for both lose the KV; a worker that left and came back keeps it.
        bootstrap_host: where decode workers find it.
    """

    url: str
    role: Role
    handshake: Handshake
    alive: bool = True
    draining: bool = False
    epoch: int = 0
    in_flight: int = 0
    streams: int = 0
    load: Load | None = None
    announced_at_s: float | None = None
    announcement: Announcement | None = None
    evictions: Evictions | None = None
    publishes: bool | None = None
    breaker: Breaker = field(default_factory=Breaker)
    headroom: Headroom = field(default_factory=Headroom)
    identity: str = field(init=False)
    bootstrap_host: str = field(init=False)

    def __post_init__(self) -> None:
        host = urlsplit(self.url).hostname
        assert host is not None, "RouterConfig.check admits no URL without a host"
        self.bootstrap_host = host
        self._identify()

    def reconnected(self, handshake: Handshake, *, restarted: bool) -> None:
        """Take its new description: it answers after it was down."""
        self.handshake, self.alive, self.load = handshake, True, None
        self.draining = self.draining and not restarted
        self.epoch += restarted
        self._identify()

    def note_flushes(self, flushes: int | None) -> None:
        """Take its count of cache flushes; above the last one, what sessions had there is gone."""
        if flushes is not None and flushes > self.handshake.flushes:
            logger.info("%s has flushed its KV cache", self.url)
            self.handshake = replace(self.handshake, flushes=flushes)
            self._identify()

    def _identify(self) -> None:
        # Kept: one string for all the turns that remember it.
        process = self.handshake.boot_id or self.epoch
        self.identity = f"{self.url}#{process}.{self.handshake.flushes}"

    @property
    def id(self) -> str:
        """Host and port, for operators."""
        return urlsplit(self.url).netloc

    @property
    def ready(self) -> bool:
        """Whether it may be given work."""
        return self.alive and not self.draining and self.breaker.admits

    # -- ppd.placement.WorkerView --------------------------------------------------------

    @property
    def name(self) -> str:
        """What placement hashes."""
        return self.url

    @property
    def running(self) -> int:
        """Requests decoding there; answers that do not stream are in its own report only."""
        return max(self.streams, 0 if self.load is None else self.load.running)

    @property
    def takes_appends(self) -> bool:
        """Whether it offers local turns."""
        return self.handshake.local_prefill

    @property
    def page_size(self) -> int:
        """Of its KV cache, in tokens."""
        return self.handshake.page_size

    @property
    def free_tokens(self) -> int | None:
        """KV left by its last report; None without one."""
        return None if self.load is None else self.load.free_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether it has KV for so many tokens, as far as it reports.

        A request that no worker has room for while it is idle is the engine's to refuse.
        """
        left = self.headroom.left_tokens
        return left is None or tokens <= left or self.in_flight == 0

    def evicted_tokens(self, session: int) -> int:
        """Tokens that its KV events say it has dropped from a conversation's end."""
        return 0 if self.evictions is None else self.evictions.lost(session)
