"""What a worker's KV cache has dropped of each conversation, by the blocks it says it removed.

A radix cache drops leaves first, so a conversation loses its end first: what counts is how many
of its last tokens are gone. What it left behind (reasoning that did not come back, a reply that
was made anew) hangs beside its path, and is nobody's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_SESSIONS = 65_536  # that have lost something and not come back
_MAX_BLOCKS = 8_000_000  # 64 MB of names


@dataclass(slots=True)
class _Chain:
    """Blocks that were stored together, one behind the other."""

    blocks: array[int]
    block_tokens: int


class Evictions:
    """Of one cache. Blocks are named by signed 64-bit hashes of all tokens up to their end."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._blocks = 0
        self._paths: dict[int, list[_Chain]] = {}  # what a session's last request was stored as
        self._ends: dict[int, int] = {}  # sessions by the last blocks of their chains
        self._lost: OrderedDict[int, int] = OrderedDict()

    def lost(self, session: int) -> int:
        """Tokens that have been dropped from the conversation's end since its last request."""
        return self._lost.get(session, 0)

    def served(self, session: int) -> None:
        """A request of the conversation has ended there: all of it is there, whether or not the
        cache has said so yet."""
        self._lost.pop(session, None)

    def stored(
        self, session: int, parent: int | None, blocks: Sequence[int], block_tokens: int
    ) -> None:
        """A request of the conversation has stored these behind ``parent``, in order: all before
        them is there."""
        names = array("q", blocks)
        self.served(session)
        if not names:
            return
        if names[-1] in self._ends:  # it was not there any more, and that was not heard
            self.forget()
        if self._blocks + len(names) > self._max_blocks:
            self.forget()
        self._leave(session, parent)
        self._paths.setdefault(session, []).append(_Chain(names, block_tokens))
        self._ends[names[-1]] = session
        self._blocks += len(names)

    def removed(self, blocks: Sequence[int]) -> int:
        """Those of one node are in order, nodes as they come. Gives the tokens of known
        conversations among them."""
        tokens = 0
        for at, block in enumerate(blocks):
            session = self._ends.get(block)
            if session is None:
                continue
            path = self._paths[session]
            number = next(i for i, chain in enumerate(path) if chain.blocks[-1] == block)
            names = path[number].blocks
            gone = 1  # a node may be the end of a chain only
            while gone <= at and gone < len(names) and blocks[at - gone] == names[-1 - gone]:
                gone += 1
            gone_tokens = gone * path[number].block_tokens
            self._cut(session, number, len(names) - gone)
            self._lose(session, gone_tokens)
            tokens += gone_tokens
        return tokens

    def cleared(self) -> None:
        """The whole cache was emptied."""
        for session, path in self._paths.items():
            self._lose(session, sum(len(chain.blocks) * chain.block_tokens for chain in path))
        self._forget_paths()

    def forget(self) -> None:
        """Something was missed: nothing is known to be lost."""
        self._forget_paths()
        self._lost.clear()

    def _forget_paths(self) -> None:
        self._paths.clear()
        self._ends.clear()
        self._blocks = 0

    def _leave(self, session: int, parent: int | None) -> None:
        """The conversation goes on behind ``parent``: what it had behind that is not its any
        more, nor is anything if it was not its own."""
        path = self._paths.get(session, [])
        for number in reversed(range(len(path))):
            names = path[number].blocks
            if names[-1] == parent:
                return
            kept = 0
            if parent is not None and parent in names:
                kept = names.index(parent) + 1
            self._cut(session, number, kept)
            if kept:
                return

    def _cut(self, session: int, number: int, kept: int) -> None:
        """Of a chain, so many blocks are left."""
        path = self._paths[session]
        chain = path[number]
        if self._ends.get(chain.blocks[-1]) == session:  # no cache has a block twice; a liar may
            del self._ends[chain.blocks[-1]]
        self._blocks -= len(chain.blocks) - kept
        if kept:
            chain.blocks = chain.blocks[:kept]
            self._ends[chain.blocks[-1]] = session
            return
        del path[number]
        if not path:
            del self._paths[session]

    def _lose(self, session: int, tokens: int) -> None:
        self._lost[session] = self._lost.pop(session, 0) + tokens
        if len(self._lost) > self._max_sessions:
            self._lost.popitem(last=False)
