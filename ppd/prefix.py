"""Prefix digests: recognise that a request continues an earlier one, without a client key.

A chat history is hashed message by message, a prompt block by block; each boundary gives
the digest of everything before it. A request is remembered by the digest of its whole
input. A later request that contains that input has the same digest at one of its
boundaries, and what follows is the reply that was generated, then the new turn: so the
reply never has to be read to recognise the conversation. Forks, regenerations and edits
need no special case: they share a shorter prefix.

The digests are routing keys (xxh3-128), not proofs: whether a worker still holds the
tokens is decided by the worker (``min_cached_tokens``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import orjson
import xxhash

Digest = bytes
BLOCK_BYTES = 1024
_ROOT_BYTES = 256  # of a prompt

# Message fields that reach the prompt through usual chat templates. Left out on purpose:
# reasoning_content, which clients keep or strip as they like, and fields that SDKs add
# when they dump a reply (refusal, annotations, audio, function_call).
_FIELDS = [
    (name, name.encode()) for name in ("role", "name", "tool_call_id", "content", "tool_calls")
]


class Candidate(msgspec.Struct, frozen=True):
    """A prefix of a request that an earlier request may have ended with."""

    digest: Digest
    bytes_after: int  # input that follows it


class Anchor(msgspec.Struct, frozen=True):
    """Where a prompt ended: the digest of its last whole block, and what follows that."""

    block: Digest
    tail_bytes: int


class PrefixChain(Protocol):
    """The prefixes of one request."""

    @property
    def end(self) -> Digest:
        """Digest of the whole input."""

    @property
    def anchor(self) -> Anchor | None:
        """What an index must remember to offer this input as a candidate, besides ``end``."""

    @property
    def root(self) -> Digest:
        """Of how the conversation opens: the same in all its turns, unless it opens with hardly
        anything."""

    @property
    def total_bytes(self) -> int: ...

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        """All prefixes, longest first. ``tails``: tail lengths remembered for a block."""


class MessageChain(msgspec.Struct, frozen=True):
    """Prefixes of a chat: one boundary a message."""

    digests: tuple[Digest, ...]
    sizes: tuple[int, ...]  # bytes up to each boundary
    opening: int  # the first message of a user

    @property
    def end(self) -> Digest:
        return self.digests[-1]

    @property
    def anchor(self) -> None:
        return None

    @property
    def root(self) -> Digest:
        return self.digests[self.opening]

    @property
    def total_bytes(self) -> int:
        return self.sizes[-1]

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        total = self.sizes[-1]
        for digest, size in zip(reversed(self.digests), reversed(self.sizes), strict=True):
            yield Candidate(digest, total - size)


class BlockChain(msgspec.Struct, frozen=True):
    """Prefixes of a prompt: whole blocks, and from each the remembered tails."""

    data: bytes
    blocks: tuple[Digest, ...]  # after 0, 1, 2, ... whole blocks

    @property
    def end(self) -> Digest:
        return self._tail_digest(len(self.blocks) - 1, len(self.data))

    @property
    def root(self) -> Digest:
        return self._tail_digest(0, min(_ROOT_BYTES, len(self.data)))

    @property
    def anchor(self) -> Anchor:
        last = len(self.blocks) - 1
        return Anchor(self.blocks[last], len(self.data) - last * BLOCK_BYTES)

    @property
    def total_bytes(self) -> int:
        return len(self.data)

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        total = len(self.data)
        for i in range(len(self.blocks) - 1, -1, -1):
            start = i * BLOCK_BYTES
            for tail in sorted(tails(self.blocks[i]), reverse=True):
                if start + tail <= total:
                    yield Candidate(self._tail_digest(i, start + tail), total - start - tail)

    def _tail_digest(self, block: int, end: int) -> Digest:
        hasher = xxhash.xxh3_128(self.blocks[block])
        hasher.update(self.data[block * BLOCK_BYTES : end])
        return hasher.digest()


def hash_messages(salt: bytes, messages: Sequence[Mapping[str, Any]]) -> MessageChain:
    """The chain of a chat history (at least one message).

    Args:
        salt: tenant, model and whatever else stands before the messages in the prompt
            (tools, template options): histories under different salts never match.
    """
    hasher = xxhash.xxh3_128(salt)
    digests: list[Digest] = []
    sizes: list[int] = []
    size = 0
    opening: int | None = None
    for i, message in enumerate(messages):
        if opening is None and message.get("role") == "user":
            opening = i
        parts = []
        for field, name in _FIELDS:
            value = message.get(field)
            if value is None:
                continue
            if type(value) is str:
                kind, data = b"text", value.encode(errors="surrogatepass")
            else:
                kind, data = _canonical(value)
            parts.append(b"%b %b %d %b" % (name, kind, len(data), data))
            size += len(data)
        parts.append(b"\n")
        hasher.update(b"".join(parts))
        digests.append(hasher.digest())
        sizes.append(size)
    return MessageChain(tuple(digests), tuple(sizes), 0 if opening is None else opening)


def hash_text(salt: bytes, text: str) -> BlockChain:
    """The chain of a plain prompt."""
    return _hash_blocks(b"text " + salt, text.encode(errors="surrogatepass"))


def hash_ids(salt: bytes, input_ids: Sequence[int]) -> BlockChain:
    """The chain of a tokenized prompt.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
        TypeError: an id is no integer.
    """
    return _hash_blocks(b"ids " + salt, array("I", input_ids).tobytes())


def _hash_blocks(salt: bytes, data: bytes) -> BlockChain:
    hasher = xxhash.xxh3_128(salt)
    blocks = [hasher.digest()]
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        hasher.update(data[start : start + BLOCK_BYTES])
        blocks.append(hasher.digest())
    return BlockChain(data, tuple(blocks))


def _canonical(value: object) -> tuple[bytes, bytes]:
    """What kind of value it is (no string), and bytes that stand for it among its kind."""
    match value:
        case [{"type": "text", "text": str(text), **rest}] if not rest:
            # Some clients wrap a string in one text part; templates render both alike.
            return b"text", text.encode(errors="surrogatepass")
        case _:
            return b"json", orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
