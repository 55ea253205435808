"""What a worker's KV cache has dropped of each conversation, by the blocks it says it removed.

A radix cache drops leaves first, so a conversation loses its end first: what counts is how many
of its last tokens are gone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SESSIONS = 65_536  # that have lost something and not come back


@dataclass(frozen=True, slots=True)
class _Chain:
    """Blocks that were stored together, one behind the other."""

    session: int
    blocks: array[int]
    block_tokens: int


class Evictions:
    """Of one cache. Blocks are named by signed 64-bit hashes of all tokens up to their end."""

    def __init__(self, most_sessions: int = _MOST_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self._chains: dict[int, _Chain] = {}  # by the last block that is still there
        self._lost: OrderedDict[int, int] = OrderedDict()

    def lost(self, session: int) -> int:
        """Tokens that have been dropped from the conversation's end since its last request."""
        return self._lost.get(session, 0)

    def served(self, session: int) -> None:
        """A request of the conversation has ended there: all of it is there, whether or not the
        cache has said so yet."""
        self._lost.pop(session, None)

    def stored(self, session: int, blocks: Sequence[int], block_tokens: int) -> None:
        """A request of the conversation has stored these, in order: all before them is there."""
        self.served(session)
        if blocks:
            self._chains[blocks[-1]] = _Chain(session, array("q", blocks), block_tokens)

    def removed(self, blocks: Sequence[int]) -> int:
        """Those of one node are in order, nodes as they come. Gives the tokens of known
        conversations among them."""
        tokens = 0
        for at, block in enumerate(blocks):
            chain = self._chains.pop(block, None)
            if chain is None:
                continue
            gone = 1  # a node may be the end of a chain only
            while (
                gone <= at
                and gone < len(chain.blocks)
                and blocks[at - gone] == chain.blocks[-1 - gone]
            ):
                gone += 1
            if left := chain.blocks[:-gone]:
                self._chains[left[-1]] = _Chain(chain.session, left, chain.block_tokens)
            self._lose(chain.session, gone * chain.block_tokens)
            tokens += gone * chain.block_tokens
        return tokens

    def cleared(self) -> None:
        """The whole cache was emptied."""
        for chain in self._chains.values():
            self._lose(chain.session, len(chain.blocks) * chain.block_tokens)
        self._chains.clear()

    def forget(self) -> None:
        """Something was missed: nothing is known to be lost."""
        self._chains.clear()
        self._lost.clear()

    def _lose(self, session: int, tokens: int) -> None:
        self._lost[session] = self._lost.pop(session, 0) + tokens
        if len(self._lost) > self._most_sessions:
            self._lost.popitem(last=False)
