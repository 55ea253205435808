"""How much of each conversation a worker's KV cache has evicted, by its events of removed blocks.

A radix cache evicts leaves first, so a conversation loses its last tokens first: the state of a
conversation is the number of these. Blocks that a conversation has branched away from (reasoning
that the client did not send back, a reply that was regenerated) belong to no conversation.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_SESSIONS = 65_536  # with evicted tokens and no request since
_MAX_BLOCKS = 8_000_000  # 64 MB of block hashes


@dataclass(slots=True)
class _Chain:
    """Consecutive blocks that were stored together."""

    blocks: array[int]
    block_tokens: int


class Evictions:
    """Tracks the evicted tokens of each conversation in the KV cache of one worker.

    A block is identified by a signed 64-bit hash of all tokens up to its end.

    Args:
        max_sessions: conversations with evicted tokens to keep; the oldest are dropped first.
        max_blocks: blocks to keep; beyond them all records are dropped.
    """

    def __init__(self, max_sessions: int = _MAX_SESSIONS, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._blocks = 0
        self._paths: dict[int, list[_Chain]] = {}  # the chains of a session's last request
        self._ends: dict[int, int] = {}  # session by the last block of each chain
        self._lost: OrderedDict[int, int] = OrderedDict()

    def lost(self, session: int) -> int:
        """The number of tokens evicted from the conversation's end since its last request."""
        return self._lost.get(session, 0)

    def served(self, session: int) -> None:
        """Record that the worker served a request of the conversation.

        All of the conversation is cached then, whether or not its events have arrived yet.
        """
        self._lost.pop(session, None)

    def stored(
        self, session: int, parent: int | None, blocks: Sequence[int], block_tokens: int
    ) -> None:
        """Record that a request of the conversation stored ``blocks``.

        Args:
            session: the conversation.
            parent: the block before the first of ``blocks``; None at the start of the prompt. All
                blocks before these are cached.
            blocks: block hashes, in the order of the prompt.
            block_tokens: tokens of a block.
        """
        hashes = array("q", blocks)
        self.served(session)
        if not hashes:
            return
        if hashes[-1] in self._ends:  # stored twice: the event of its removal was lost
            self.forget()
        if self._blocks + len(hashes) > self._max_blocks:
            self.forget()
        self._branch_off(session, parent)
        self._paths.setdefault(session, []).append(_Chain(hashes, block_tokens))
        self._ends[hashes[-1]] = session
        self._blocks += len(hashes)

    def removed(self, blocks: Sequence[int]) -> int:
        """Record that the cache removed ``blocks``.

        Args:
            blocks: block hashes. Those of one radix node are in the order of its tokens; nodes
                are in any order.

        Returns:
            How many tokens of tracked conversations are among them.
        """
        tokens = 0
        for at, block in enumerate(blocks):
            session = self._ends.get(block)
            if session is None:
                continue
            path = self._paths[session]
            number = next(i for i, chain in enumerate(path) if chain.blocks[-1] == block)
            hashes = path[number].blocks
            count = 1  # a node may be only the last part of a chain
            while count <= at and count < len(hashes) and blocks[at - count] == hashes[-1 - count]:
                count += 1
            lost_tokens = count * path[number].block_tokens
            self._truncate(session, number, len(hashes) - count)
            self._add_lost(session, lost_tokens)
            tokens += lost_tokens
        return tokens

    def cleared(self) -> None:
        """Record that the whole cache was emptied."""
        for session, path in self._paths.items():
            self._add_lost(session, sum(len(chain.blocks) * chain.block_tokens for chain in path))
        self._forget_paths()

    def forget(self) -> None:
        """Drop all records, because an event was missed; no token counts as evicted."""
        self._forget_paths()
        self._lost.clear()

    def _forget_paths(self) -> None:
        self._paths.clear()
        self._ends.clear()
        self._blocks = 0

    def _branch_off(self, session: int, parent: int | None) -> None:
        """Keep of the conversation's path only the blocks up to ``parent``.

        Nothing is kept if ``parent`` is none of the path's blocks.
        """
        path = self._paths.get(session, [])
        for number in reversed(range(len(path))):
            hashes = path[number].blocks
            if hashes[-1] == parent:
                return
            kept = 0
            if parent is not None and parent in hashes:
                kept = hashes.index(parent) + 1
            self._truncate(session, number, kept)
            if kept:
                return

    def _truncate(self, session: int, number: int, kept: int) -> None:
        """Keep the first ``kept`` blocks of a chain; drop the chain if none is left."""
        path = self._paths[session]
        chain = path[number]
        # No sound cache stores a block for two sessions, but events come from outside.
        if self._ends.get(chain.blocks[-1]) == session:
            del self._ends[chain.blocks[-1]]
        self._blocks -= len(chain.blocks) - kept
        if kept:
            chain.blocks = chain.blocks[:kept]
            self._ends[chain.blocks[-1]] = session
            return
        del path[number]
        if not path:
            del self._paths[session]

    def _add_lost(self, session: int, tokens: int) -> None:
        self._lost[session] = self._lost.pop(session, 0) + tokens
        if len(self._lost) > self._max_sessions:
            self._lost.popitem(last=False)
