"""What was put into which turn of which conversation.

Kept by the digest of the history as the client sends it, up to and with the turn: so forks share
it, an edited history has none behind the edit, and nobody finds it who does not send that history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_128_digest

from ppd.prefix import Digest

from ..config.retrieval import Wish
from ..serving.resume import Insertion, with_appended

_OVERHEAD_BYTES = 512  # of an entry, beside its text


@dataclass(frozen=True, slots=True)
class Citation:
    """Attributes:
    turn: of the conversation, whose message holds the passage; from 1.
    """

    id: str
    score: float
    turn: int
    stage: str


@dataclass(frozen=True, slots=True)
class Injection:
    """What one turn got.

    Attributes:
        text: in front of its message; "" if nothing was found worth it.
        asides: what the model read in the midst of its reply, and after how many characters.
        reply: digest of the reply up to the last of them: another reply to the same turn has none.
    """

    wish: Wish | None
    text: str
    citations: tuple[Citation, ...]
    asides: tuple[Insertion, ...] = ()
    reply: Digest = b""

    def put_back(self, reply: str) -> str:
        """A reply as its model read it; as it is, if it is not the one."""
        if not self.asides or digest_of(reply[: self.asides[-1][0]]) != self.reply:
            return reply
        return with_appended(reply, self.asides)

    NOTHING: ClassVar[Injection]


def digest_of(text: str) -> Digest:
    return xxh3_128_digest(text.encode(errors="surrogatepass"))


Injection.NOTHING = Injection(None, "", ())


class Memory:
    """Args:
    max_bytes: all told; the least recently used are forgotten.
    ttl_s: after this time unused.
    clock: seconds, monotonic.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._kept: OrderedDict[Digest, tuple[float, Injection]] = OrderedDict()
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self.size_bytes = 0

    def get(self, turn: Digest) -> Injection | None:
        kept = self._kept.get(turn)
        if kept is None:
            return None
        now_s = self._clock()
        if now_s - kept[0] > self._ttl_s:
            self._forget(turn)
            return None
        self._kept[turn] = (now_s, kept[1])
        self._kept.move_to_end(turn)
        return kept[1]

    def forget(self, turn: Digest) -> None:
        """That turn was answered without."""
        if turn in self._kept:
            self._forget(turn)

    def put(self, turn: Digest, injection: Injection) -> None:
        self.forget(turn)
        self._kept[turn] = (self._clock(), injection)
        self.size_bytes += _bytes_of(injection)
        while self.size_bytes > self._max_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, turn: Digest) -> None:
        _, injection = self._kept.pop(turn)
        self.size_bytes -= _bytes_of(injection)


def _bytes_of(injection: Injection) -> int:
    named = sum(len(one.id) + 64 for one in injection.citations)
    texts = (injection.text, *(text for _, text in injection.asides))
    held = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return held + named + _OVERHEAD_BYTES
