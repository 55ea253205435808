"""Prefix digests, by which a request is recognised as the continuation of an earlier one.

A chat history is hashed message by message, a prompt block by block. Each boundary has the
digest of the input before it. An index keeps the digest of each request's whole input. A later
request that contains that input has the same digest at one of its boundaries. After that
boundary follow the reply that was generated and the new turn, so the reply is never compared.
Images, audio and video are hashed by their bytes, and do not count as text (``ppd.media``).
Forks, regenerations and edits need no special case: they share a shorter prefix.

The digests are routing keys (xxh3-128), not proofs. The worker itself checks whether it still
holds the tokens (``min_cached_tokens``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import orjson
import xxhash

from ppd.media import Media, has_media, split

Digest = bytes
BLOCK_BYTES = 1024
_ROOT_BYTES = 256  # length of a prompt's root

# Message fields that reach the prompt through usual chat templates. Left out on purpose:
# reasoning_content, which clients keep or strip as they like, and fields that SDKs add
# when they dump a reply (refusal, annotations, audio, function_call).
_FIELDS = [
    (name, name.encode())
    for name in ("role", "name", "tool_call_id", "content", "tool_calls", "tools")
]
_PLAIN_FIELDS = [(field, name) for field, name in _FIELDS if field in ("role", "content")]


class Candidate(msgspec.Struct, frozen=True):
    """A prefix of a request that may be the whole input of an earlier request.

    Attributes:
        digest: the digest of the prefix.
        bytes_after: bytes of the input's text after the prefix.
        media_after: media of the input after the prefix.
    """

    digest: Digest
    bytes_after: int
    media_after: tuple[Media, ...] = ()


class Anchor(msgspec.Struct, frozen=True):
    """The end of a prompt, relative to its blocks.

    Attributes:
        block: the digest after the last whole block.
        tail_bytes: bytes of the prompt after that block.
    """

    block: Digest
    tail_bytes: int


class PrefixChain(Protocol):
    """The prefixes of one request."""

    @property
    def end(self) -> Digest:
        """The digest of the whole input."""

    @property
    def anchor(self) -> Anchor | None:
        """The anchor that an index must keep besides ``end``; None if ``end`` is enough."""

    @property
    def root(self) -> Digest:
        """The digest of the conversation's opening.

        It is the same for all turns of a conversation, unless the opening is very short.
        """

    @property
    def total_bytes(self) -> int:
        """The bytes of the input's text."""

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        """Iterate over all prefixes, the longest first.

        Args:
            tails: maps a block's digest to the tail lengths of the anchors that an index keeps.
        """


class MessageChain(msgspec.Struct, frozen=True):
    """The prefixes of a chat, with a boundary after each message.

    Attributes:
        digests: the digest at each boundary.
        sizes: bytes of text up to each boundary, with those before the messages.
        opening: index of the first message of a user.
        media: of all messages, in their order.
        media_ends: number of media up to each boundary; () without media.
    """

    digests: tuple[Digest, ...]
    sizes: tuple[int, ...]
    opening: int
    media: tuple[Media, ...] = ()
    media_ends: tuple[int, ...] = ()

    @property
    def end(self) -> Digest:
        """The digest of the whole chat."""
        return self.digests[-1]

    @property
    def anchor(self) -> None:
        """None: the digest of the whole chat is enough."""
        return

    @property
    def root(self) -> Digest:
        """The digest up to the first message of a user."""
        return self.digests[self.opening]

    @property
    def total_bytes(self) -> int:
        """The bytes of the chat's text."""
        return self.sizes[-1]

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        """Iterate over the prefixes that end with a message, the longest first."""
        total = self.sizes[-1]
        if self.media:
            ends = zip(self.digests, self.sizes, self.media_ends, strict=True)
            for digest, size, end in reversed(list(ends)):
                yield Candidate(digest, total - size, self.media[end:])
            return
        for digest, size in zip(reversed(self.digests), reversed(self.sizes), strict=True):
            yield Candidate(digest, total - size)


class BlockChain(msgspec.Struct, frozen=True):
    """The prefixes of a prompt: its whole blocks, with the tails that an index keeps.

    Attributes:
        data: the prompt.
        blocks: the digests after 0, 1, 2, ... whole blocks.
        holds_ids: whether the prompt is token ids, of four bytes each, and no text.
    """

    data: bytes
    blocks: tuple[Digest, ...]
    holds_ids: bool = False

    @property
    def end(self) -> Digest:
        """The digest of the whole prompt."""
        return self._tail_digest(len(self.blocks) - 1, len(self.data))

    @property
    def root(self) -> Digest:
        """The digest of the first 256 bytes."""
        return self._tail_digest(0, min(_ROOT_BYTES, len(self.data)))

    @property
    def anchor(self) -> Anchor:
        """The end of the prompt relative to its last whole block."""
        last = len(self.blocks) - 1
        return Anchor(self.blocks[last], len(self.data) - last * BLOCK_BYTES)

    @property
    def total_bytes(self) -> int:
        """The bytes of the prompt."""
        return len(self.data)

    def candidates(self, tails: Callable[[Digest], Iterable[int]]) -> Iterator[Candidate]:
        """Iterate over the prefixes that end with one of the ``tails``, the longest first."""
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


def hash_messages(
    salt: bytes, messages: Sequence[Mapping[str, Any]], bytes_before: int = 0
) -> MessageChain:
    """Hash a chat history of at least one message.

    Args:
        salt: the tenant, the model, and everything that the prompt holds before the messages
            (tools, template options). Histories under different salts never match.
        messages: the messages, as in OpenAI's chat API.
        bytes_before: bytes of text that the prompt holds before the messages.
    """
    hasher = xxhash.xxh3_128(salt)
    digests: list[Digest] = []
    sizes: list[int] = []
    size = bytes_before
    opening: int | None = None
    media: list[Media] = []
    media_counts: list[tuple[int, int]] = []  # index of a message with media, number up to its end
    for i, message in enumerate(messages):
        if opening is None and message.get("role") == "user":
            opening = i
        parts = []
        plain = len(message) == 2 and "role" in message and "content" in message
        for field, name in _PLAIN_FIELDS if plain else _FIELDS:
            value = message.get(field)
            if value is None:
                continue
            if type(value) is str:
                kind, data = b"text", value.encode(errors="surrogatepass")
                size += len(data)
            elif field == "content" and type(value) is list and has_media(value):
                rest, text_bytes, found = split(value)
                kind, data = b"media", orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)
                size += text_bytes
                media += found
                media_counts.append((i, len(media)))
            else:
                kind, data = _canonical(value)
                size += len(data)
            parts.append(b"%b %b %d %b" % (name, kind, len(data), data))
        parts.append(b"\n")
        hasher.update(b"".join(parts))
        digests.append(hasher.digest())
        sizes.append(size)
    opening = 0 if opening is None else opening
    if not media:
        return MessageChain(tuple(digests), tuple(sizes), opening)
    ends = _media_ends(media_counts, len(digests))
    return MessageChain(tuple(digests), tuple(sizes), opening, tuple(media), ends)


def _media_ends(media_counts: Sequence[tuple[int, int]], messages: int) -> tuple[int, ...]:
    """Return the number of media up to the end of each message."""
    ends = [0] * messages
    for (first, count), (after, _) in pairwise([*media_counts, (messages, 0)]):
        ends[first:after] = [count] * (after - first)
    return tuple(ends)


def hash_text(salt: bytes, text: str) -> BlockChain:
    """Hash a plain prompt."""
    return _hash_blocks(b"text " + salt, text.encode(errors="surrogatepass"))


def hash_ids(salt: bytes, input_ids: Sequence[int]) -> BlockChain:
    """Hash a tokenized prompt.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
        TypeError: an id is no integer.
    """
    return _hash_blocks(b"ids " + salt, array("I", input_ids).tobytes(), holds_ids=True)


def _hash_blocks(salt: bytes, data: bytes, *, holds_ids: bool = False) -> BlockChain:
    hasher = xxhash.xxh3_128(salt)
    blocks = [hasher.digest()]
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        hasher.update(data[start : start + BLOCK_BYTES])
        blocks.append(hasher.digest())
    return BlockChain(data, tuple(blocks), holds_ids)


def _canonical(value: object) -> tuple[bytes, bytes]:
    """Encode a value other than a string: its kind, and bytes that are unique within the kind."""
    match value:
        case [{"type": "text", "text": str(text), **rest}] if not rest:
            # Some clients wrap a string in one text part; templates render both alike.
            return b"text", text.encode(errors="surrogatepass")
        case _:
            return b"json", orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
