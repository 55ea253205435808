"""Long prefixes that several conversations share, and the workers that hold their KV.

A system prompt of thousands of tokens begins many conversations. The session index finds whole
earlier inputs only, and no such prefix. This index has one entry for each boundary of first turns
behind which another conversation may go on. It is a record of what was sent, not of what a cache
has kept. A wrong entry costs a prefill that would have been needed anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from ppd.prefix import BLOCK_BYTES, BlockChain, Digest, MessageChain, PrefixChain

MIN_BYTES = 4096  # about 1,000 tokens; shorter prefixes are not worth a detour
_MAX_OF_CHAT = 8  # prefixes of a chat
_NONE: Mapping[str, int] = {}


def shareable(chain: PrefixChain, min_bytes: int) -> Iterator[tuple[Digest, int]]:
    """Iterate over prefixes that other conversations may share, the shortest first.

    They are few, however long the input is, and never the whole input: of a chat the first that
    end with a message, of a prompt whole blocks, each about an eighth longer than the last.

    Args:
        chain: of an input.
        min_bytes: minimum size.

    Yields:
        Digest and size in bytes of each.
    """
    if isinstance(chain, MessageChain):
        pairs = zip(chain.digests[:-1], chain.sizes, strict=False)
        yield from islice((pair for pair in pairs if pair[1] >= min_bytes), _MAX_OF_CHAT)
    elif isinstance(chain, BlockChain):
        block = max(1, -(-min_bytes // BLOCK_BYTES))
        while block * BLOCK_BYTES < len(chain.data):
            yield chain.blocks[block], block * BLOCK_BYTES
            block = max(block + 1, block * 9 // 8)


class SharedPrefixes:
    """Which workers were sent which long prefixes; the least recently used are dropped.

    Args:
        capacity: prefixes to keep.
        ttl_s: a worker counts as holding a prefix for so long after its last use there.
        min_bytes: shorter prefixes are not kept.
    """

    def __init__(
        self, capacity: int = 65_536, ttl_s: float = 600.0, min_bytes: int = MIN_BYTES
    ) -> None:
        assert capacity > 0
        assert ttl_s > 0
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._min_bytes = min_bytes
        self._sent: OrderedDict[Digest, dict[str, float]] = OrderedDict()  # time by worker

    def __len__(self) -> int:
        return len(self._sent)

    def find(self, chain: PrefixChain, now_s: float) -> Mapping[str, int]:
        """Bytes of ``chain`` that each worker holds, by its identity; absent: none.

        Args:
            chain: of a request that continues no known conversation.
            now_s: by a monotonic clock.
        """
        held: dict[str, int] | None = None
        oldest_s = now_s - self._ttl_s
        for digest, size in shareable(chain, self._min_bytes):
            workers = self._sent.get(digest)
            if workers is None:
                continue
            for worker, used_s in workers.items():
                if used_s > oldest_s:
                    held = {} if held is None else held
                    held[worker] = size
        return _NONE if held is None else held

    def record(self, chain: PrefixChain, workers: Iterable[str], now_s: float) -> None:
        """Record that a request was sent to workers, which will hold all of its prefixes.

        Args:
            chain: of the request.
            workers: their identities.
            now_s: by a monotonic clock.
        """
        oldest_s = now_s - self._ttl_s
        for digest, _ in shareable(chain, self._min_bytes):
            known = self._sent.get(digest)
            if known is None:
                self._sent[digest] = dict.fromkeys(workers, now_s)
                if len(self._sent) > self._capacity:
                    self._sent.popitem(last=False)
                continue
            self._sent.move_to_end(digest)
            known.update(dict.fromkeys(workers, now_s))
            for gone in [worker for worker, used_s in known.items() if used_s <= oldest_s]:
                del known[gone]
