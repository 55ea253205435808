"""The passages that were inserted into the turns of conversations.

The key is the digest of the history as the client sends it, up to and including the turn. Forks of
a conversation therefore share their passages, an edited history has none behind the edit, and only
a client that sends the history can find them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_128_digest

from ppd.prefix import Digest

from ..config.retrieval import RetrievalOptions, Stage
from ..serving.resume import Insertion, with_appended

_OVERHEAD_BYTES = 512  # of an entry, besides its text
_CITATION_BYTES = 64  # of a citation, besides its id


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage in a conversation.

    Attributes:
        id: of the passage, in its collection.
        collection: that it was found in.
        score: of the search; higher is nearer.
        turn: the turn whose message or reply holds the passage, from 1.
        stage: the stage of retrieval that inserted it.
    """

    id: str
    collection: str
    score: float
    turn: int
    stage: str


@dataclass(frozen=True, slots=True)
class Injection:
    """The passages of one turn.

    Attributes:
        options: of the retrieval; None if there was none.
        text: the text in front of the turn's message; "" if no passage was good enough.
        citations: the passages, of both stages.
        insertions: the text that was inserted into the reply, each after a number of characters.
        reply_digest: of the reply up to the last insertion. Another reply to the same turn has no
            insertions.
    """

    options: RetrievalOptions | None
    text: str
    citations: tuple[Citation, ...]
    insertions: tuple[Insertion, ...] = ()
    reply_digest: Digest = b""

    @property
    def of_prompt(self) -> tuple[Citation, ...]:
        """The passages in front of the turn's message."""
        return tuple(one for one in self.citations if one.stage == Stage.PREFILL)

    @property
    def of_reply(self) -> tuple[Citation, ...]:
        """The passages that were inserted into the reply."""
        return tuple(one for one in self.citations if one.stage == Stage.DECODE)

    def is_of(self, reply: str) -> bool:
        """Whether a reply is the one that has the insertions."""
        if not self.insertions:
            return False
        return digest_of(reply[: self.insertions[-1][0]]) == self.reply_digest

    def put_back(self, reply: str) -> str:
        """The reply with its insertions."""
        return with_appended(reply, self.insertions)

    NOTHING: ClassVar[Injection]


def ids_in(collection: str, citations: Iterable[Citation]) -> set[str]:
    """The ids of passages of one collection; another one may have the same ids."""
    return {one.id for one in citations if one.collection == collection}


def digest_of(text: str) -> Digest:
    """The digest of a reply's text."""
    return xxh3_128_digest(text.encode(errors="surrogatepass"))


Injection.NOTHING = Injection(None, "", ())


class Memory:
    """The injections of all conversations, bounded in bytes and time.

    Args:
        max_bytes: of all entries; the least recently used are dropped.
        ttl_s: an entry that was not used for longer is dropped.
        clock: seconds, monotonic.

    Attributes:
        size_bytes: size of all entries.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._entries: OrderedDict[Digest, tuple[float, Injection]] = OrderedDict()
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self.size_bytes = 0

    def get(self, turn: Digest) -> Injection | None:
        """The injection of a turn, which counts as used; None if there is none."""
        entry = self._entries.get(turn)
        if entry is None:
            return None
        used_at_s, injection = entry
        now_s = self._clock()
        if now_s - used_at_s > self._ttl_s:
            self._drop(turn)
            return None
        self._entries[turn] = (now_s, injection)
        self._entries.move_to_end(turn)
        return injection

    def forget(self, turn: Digest) -> None:
        """Drop the injection of a turn that is served without passages."""
        if turn in self._entries:
            self._drop(turn)

    def put(self, turn: Digest, injection: Injection) -> None:
        """Store the injection of a turn, in place of an earlier one."""
        self.forget(turn)
        self._entries[turn] = (self._clock(), injection)
        self.size_bytes += _bytes_of(injection)
        while self.size_bytes > self._max_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, turn: Digest) -> None:
        _, injection = self._entries.pop(turn)
        self.size_bytes -= _bytes_of(injection)


def _bytes_of(injection: Injection) -> int:
    citations = sum(len(citation.id) + _CITATION_BYTES for citation in injection.citations)
    texts = (injection.text, *(text for _, text in injection.insertions))
    text_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return text_bytes + citations + _OVERHEAD_BYTES
