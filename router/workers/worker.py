"""One worker, as the router knows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from ppd.announcement import Announcement
from ppd.contract import Role
from ppd.evictions import Evictions
from ppd.headroom import Headroom

from .breaker import Breaker
from .handshake import Handshake, Load

logger = logging.getLogger("ppd.router.workers")


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process behind a URL.

    Attributes:
        epoch: counts its restarts as seen from here.
        identity: what sessions remember, for a restarted worker has lost its KV: the plugin's
            process where it is told, and how often that has flushed its cache; a worker that left
        and came back kept its KV.
        draining: it gets no new work; its process is to end, or to be resumed.
        in_flight: legs under way; ``running``: those of them that stream.
        breaker: opens when its requests fail though it lives.
        load: what it said when it was last asked.
        heard_at_s: when it last announced itself; None for one that was given, added or found.
        said: its last announcement.
        evictions: what its cache has dropped, as far as its KV events are heard; None: they are
            not.
        publishes: whether its KV events come; None: nobody listens.
    """

    url: str
    role: Role
    handshake: Handshake
    alive: bool = True
    draining: bool = False
    epoch: int = 0
    in_flight: int = 0
    running: int = 0
    load: Load | None = None
    heard_at_s: float | None = None
    said: Announcement | None = None
    evictions: Evictions | None = None
    publishes: bool | None = None
    breaker: Breaker = field(default_factory=Breaker)
    headroom: Headroom = field(default_factory=Headroom)
    identity: str = field(init=False)
    bootstrap_host: str = field(init=False)

    def has_room(self, tokens: int) -> bool:
        """Whether it has KV for so many, as far as it has told; what no worker has room for while
        it is idle is the engine's to refuse."""
        left = self.headroom.left_tokens
        return left is None or tokens <= left or self.in_flight == 0

    def __post_init__(self) -> None:
        host = urlsplit(self.url).hostname
        assert host is not None, "RouterConfig.check admits no URL without a host"
        self.bootstrap_host = host
        self._name()

    def met_again(self, handshake: Handshake, *, restarted: bool) -> None:
        """It answers after it was down."""
        self.handshake, self.alive, self.load = handshake, True, None
        self.draining = self.draining and not restarted
        self.epoch += restarted
        self._name()

    def has_flushed(self, flushes: int | None) -> None:
        """It has told how often it flushed its KV cache, or not: what sessions had there is gone
        if that is more than was known."""
        if flushes is not None and flushes > self.handshake.flushes:
            logger.info("%s has flushed its KV cache", self.url)
            self.handshake = replace(self.handshake, flushes=flushes)
            self._name()

    def _name(self) -> None:
        # Kept: one string for all the turns that remember it.
        process = self.handshake.boot_id or self.epoch
        self.identity = f"{self.url}#{process}.{self.handshake.flushes}"

    @property
    def id(self) -> str:
        """For operators: host and port."""
        return urlsplit(self.url).netloc

    @property
    def ready(self) -> bool:
        """It may be given work."""
        return self.alive and not self.draining and self.breaker.admits
