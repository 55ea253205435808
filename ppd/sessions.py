"""The session index: known conversations, where their KV is, and how much of it.

One entry for each finished request, found by prefix digest. The index owns lookup,
expiry and size; of workers it holds only the names, and takes the
time from its caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import msgspec

from ppd.media import Media
from ppd.prefix import Anchor, Digest, PrefixChain

# Bounds a lookup: a prompt has a candidate for each length at which known prompts end.
_MAX_CANDIDATES = 1024


# Not tracked by the garbage collector: a million of them cost it a second, and they hold no cycles.
class Turn(msgspec.Struct, gc=False):
    """What is known of a conversation after a request has finished.

    Attributes:
        session: a number of the conversation's own, below 2**48.
        number: the turn that finished, from 1.
        home: the decode worker that holds the KV.
        prompt_tokens, completion_tokens: as the engine counted them.
        prefill_worker: the prefill worker that last saw the conversation, if any.
        prefill_tokens: how many of its tokens that worker has computed.
        usual_reply_tokens: running mean of the conversation's replies (``ppd.forecast``).
        loses_replies: its replies come back other than they were generated: the engine found
            the prompt before one cached, but not the reply.
    """

    session: int
    number: int
    home: str
    prompt_tokens: int
    completion_tokens: int
    prefill_worker: str | None
    prefill_tokens: int
    usual_reply_tokens: float
    loses_replies: bool = False

    @property
    def session_name(self) -> str:
        """The conversation's name, in logs."""
        return session_name(self.session)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is on ``home``. The last generated token was never fed back."""
        return self.prompt_tokens + max(0, self.completion_tokens - 1)


def session_name(session: int) -> str:
    """The name of a conversation, in logs and for workers."""
    return f"{session:012x}"


class Hit(msgspec.Struct, frozen=True):
    """An earlier turn that a request continues."""

    turn: Turn
    digest: Digest
    bytes_after: int  # of the request's text: the reply of ``turn`` and what is new
    media_after: tuple[Media, ...] = ()  # of what is new

    @property
    def next_turn(self) -> int:
        """The number of the request's turn: the same input again is the same turn, made anew."""
        return self.turn.number + (self.bytes_after > 0)


class _Entry(Turn, kw_only=True, gc=False):
    """A turn with what the index must know of it: one object, for there are a million."""

    anchor: Anchor | None
    expires_at_s: float


class SessionIndex:
    """Finished requests by the digest of their input; least recently used go first.

    But turns that another one followed before all that none did: so a full index has the newest
    turn of as many conversations as it has room for, and older ones (for forks, edited and
    regenerated turns) only if there is more.
    """

    def __init__(self, *, capacity: int, ttl_s: float) -> None:
        """Args: ``capacity`` in entries (about one a turn), ``ttl_s`` since last use."""
        assert capacity > 0
        assert ttl_s > 0
        self._capacity = capacity
        self._ttl_s = ttl_s
        # Each in the order of last use, and so of expiry.
        self._newest: OrderedDict[Digest, _Entry] = OrderedDict()
        self._followed: OrderedDict[Digest, _Entry] = OrderedDict()
        # For prompts: at which lengths past a block boundary known inputs end.
        self._tails: dict[Digest, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._newest) + len(self._followed)

    def find(self, chain: PrefixChain, now_s: float) -> Hit | None:
        """The longest known prefix of ``chain``."""
        for candidate in islice(chain.candidates(self._tails_of), _MAX_CANDIDATES):
            entries = self._newest
            entry = entries.get(candidate.digest)
            if entry is None:
                entries = self._followed
                entry = entries.get(candidate.digest)
            if entry is None:
                continue
            if entry.expires_at_s <= now_s:
                self._remove(entries, candidate.digest)
                continue
            entry.expires_at_s = now_s + self._ttl_s
            entries.move_to_end(candidate.digest)
            return Hit(entry, candidate.digest, candidate.bytes_after, candidate.media_after)
        return None

    def record(
        self, chain: PrefixChain, turn: Turn, now_s: float, after: Digest | None = None
    ) -> None:
        """Record a finished request, in place of an earlier one with the same input.

        Args:
            chain: prefixes of its input.
            turn: what is known now.
            now_s: by a monotonic clock.
            after: digest of the turn that it continued (``Hit.digest``).
        """
        for entries in (self._newest, self._followed):
            while entries and next(iter(entries.values())).expires_at_s <= now_s:
                self._remove(entries, next(iter(entries)))
        self._put(chain.end, chain.anchor, turn, now_s + self._ttl_s, after)

    def merge(
        self,
        digest: Digest,
        anchor: Anchor | None,
        turn: Turn,
        finished_at_s: float,
        now_s: float,
        after: Digest | None = None,
    ) -> bool:
        """Record a request that another router has finished, unless a younger one is known.

        The younger of two requests with the same input is the one that was finished or used last.
        So the order in which requests arrive does not matter.

        Args:
            digest: of its input.
            anchor: the end of its prompt, relative to the prompt's blocks.
            turn: what is known of it.
            finished_at_s: by this router's clock.
            now_s: by the same clock.
            after: digest of the turn that it continued.

        Returns:
            Whether it was recorded.
        """
        expires_at_s = min(finished_at_s, now_s) + self._ttl_s
        if expires_at_s <= now_s:
            return False
        known = self._newest.get(digest) or self._followed.get(digest)
        if known is not None and known.expires_at_s >= expires_at_s:
            return False
        self._put(digest, anchor, turn, expires_at_s, after)
        return True

    def _put(
        self,
        digest: Digest,
        anchor: Anchor | None,
        turn: Turn,
        expires_at_s: float,
        after: Digest | None,
    ) -> None:
        for entries in (self._newest, self._followed):
            if digest in entries:
                self._remove(entries, digest)
        if after is not None and (followed := self._newest.pop(after, None)) is not None:
            followed.expires_at_s = max(followed.expires_at_s, expires_at_s)
            self._followed[after] = followed
        while len(self) >= self._capacity:
            entries = self._followed or self._newest
            self._remove(entries, next(iter(entries)))
        fields = msgspec.structs.astuple(turn)
        self._newest[digest] = _Entry(*fields, anchor=anchor, expires_at_s=expires_at_s)
        if anchor is not None:
            tails = self._tails.setdefault(anchor.block, {})
            tails[anchor.tail_bytes] = tails.get(anchor.tail_bytes, 0) + 1

    def _tails_of(self, block: Digest) -> Iterable[int]:
        return self._tails.get(block, ())

    def _remove(self, entries: OrderedDict[Digest, _Entry], digest: Digest) -> None:
        anchor = entries.pop(digest).anchor
        if anchor is None:
            return
        tails = self._tails[anchor.block]
        tails[anchor.tail_bytes] -= 1
        if not tails[anchor.tail_bytes]:
            del tails[anchor.tail_bytes]
        if not tails:
            del self._tails[anchor.block]
