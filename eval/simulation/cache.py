"""A simulated worker's KV: what running requests hold, and what finished ones have left.

It counts tokens by conversation. A prefix that conversations share is found by all of them, and
counts in each of them and once more by itself. What finished requests have left is evicted from
its end, the least recently used conversation first, as a radix cache does. What runs is never
evicted. There is no time in it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that conversations share.

    Attributes:
        number: of the prefix, from 1.
    """

    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a worker's host for KV that the device has evicted.

    Attributes:
        tokens: that fit it.
        token_ms: time to copy one back to the device.
    """

    tokens: int
    token_ms: float


class KvCache:
    """The KV of a simulated worker, counted in tokens by session.

    Args:
        host_tokens: what is evicted of conversations stays on the host, so many tokens of it.
            There the whole of the least recently used conversation is dropped.
    """

    def __init__(self, capacity_tokens: int, host_tokens: int = 0) -> None:
        assert capacity_tokens > 0
        self.capacity_tokens = capacity_tokens
        self.active_tokens = 0
        self.evicted_tokens = 0
        self._idle_tokens = 0
        self._left: dict[int, tuple[int, SharedPrefix | None]] = {}  # by conversation at rest
        # By conversation, shared prefixes by their negative number; oldest use first.
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._on_host: OrderedDict[int, int] = OrderedDict()  # of the same keys, from the first on
        self._host_capacity_tokens = host_tokens
        self._host_tokens = 0

    @property
    def free_tokens(self) -> int:
        """Tokens that running requests may still take: idle ones can be evicted."""
        return self.capacity_tokens - self.active_tokens

    def cached_tokens(self, session: int, shared: SharedPrefix | None = None) -> int:
        """Return how many tokens of a session it holds, its shared prefix included."""
        own = self._idle.get(session, 0)
        return own if shared is None else max(own, self._idle.get(-shared.number, 0))

    def host_tokens(self, session: int) -> int:
        """Return how many of a session's first tokens the host has."""
        return self._on_host.get(session, 0)

    def lost_tokens(self, session: int) -> int:
        """Return how many tokens of a session were lost since its last request ended.

        What the host has is not lost.
        """
        left, shared = self._left.get(session, (0, None))
        held = max(self.cached_tokens(session, shared), self.host_tokens(session))
        return max(0, left - held)

    def can_take(self, tokens: int) -> bool:
        """Return whether so many tokens fit, after evictions."""
        return tokens <= self.free_tokens

    def take(self, session: int, tokens: int, shared: SharedPrefix | None = None) -> int:
        """Hold ``tokens`` for a request of ``session``; return how many of them were cached."""
        assert self.can_take(tokens)
        self._left.pop(session, None)
        on_host = self._drop_from_host(session)  # its own evictions must not drop it there
        found = self._idle.pop(session, 0)
        self._idle_tokens -= found
        if shared is not None and -shared.number in self._idle:
            self._idle.move_to_end(-shared.number)
            found = max(found, self._idle[-shared.number])
        self.active_tokens += tokens
        self._evict()
        self._keep_on_host(session, on_host)
        return min(found, tokens)

    def give(
        self, session: int, tokens: int, kept_tokens: int, shared: SharedPrefix | None = None
    ) -> None:
        """End a request that holds ``tokens``; ``kept_tokens`` of them stay cached."""
        assert 0 <= kept_tokens <= tokens <= self.active_tokens
        self.active_tokens -= tokens
        if shared is not None:
            self._keep(-shared.number, min(shared.tokens, kept_tokens))
        # A second request of the same conversation may have ended meanwhile: the longer one stays.
        self._keep(session, kept_tokens)
        self._left[session] = self._idle[session], shared
        self._evict()

    def restorable(self, session: int, found: int, tokens: int) -> int:
        """Return how many of a request's ``tokens`` the host has and the device has not found."""
        return max(0, min(self.host_tokens(session), tokens) - found)

    def cut(self, session: int, tokens: int) -> None:
        """Count what a session has beyond its first ``tokens`` as evicted: no prompt has it."""
        held = self._idle.get(session, 0)
        if session in self._left:
            left, shared = self._left[session]
            self._left[session] = min(left, tokens), shared
        if held > tokens:
            self._idle[session] = tokens
            self._idle_tokens -= held - tokens
        if self.host_tokens(session) > tokens:
            self._keep_on_host(session, tokens)

    def _keep(self, key: int, tokens: int) -> None:
        old = self._idle.pop(key, 0)
        self._idle[key] = max(old, tokens)
        self._idle_tokens += self._idle[key] - old

    def _evict(self) -> None:
        over = self.active_tokens + self._idle_tokens - self.capacity_tokens
        while over > 0:
            session, held = next(iter(self._idle.items()))
            if session >= 0 and held > self.host_tokens(session):
                self._keep_on_host(session, held)
            gone = min(held, over)
            if gone == held:
                del self._idle[session]
            else:
                self._idle[session] = held - gone
            self._idle_tokens -= gone
            self.evicted_tokens += gone
            over -= gone

    def _drop_from_host(self, session: int) -> int:
        tokens = self._on_host.pop(session, 0)
        self._host_tokens -= tokens
        return tokens

    def _keep_on_host(self, session: int, tokens: int) -> None:
        self._drop_from_host(session)
        if not 0 < tokens <= self._host_capacity_tokens:
            return
        self._on_host[session] = tokens
        self._host_tokens += tokens
        while self._host_tokens > self._host_capacity_tokens:
            _, dropped = self._on_host.popitem(last=False)
            self._host_tokens -= dropped
