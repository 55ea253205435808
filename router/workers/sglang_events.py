"""The wire format of SGLang's KV events.

``--kv-events-config`` makes a worker publish what its cache stores and removes
(``disaggregation/kv_events.py``, 0.5.21): numbered batches in msgpack over ZeroMQ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

_DEVICE_TIERS = ("GPU", None)  # the tier that is searched first has this name on a CPU, too


class BlocksStored(msgspec.Struct, tag="BlockStored", gc=False):
    """A request stored blocks in the cache, in the order of its prompt.

    Attributes:
        block_hashes: one 64-bit hash of the prompt up to the end of each block.
        parent_block_hash: the block before the first one; None at the start of the prompt.
        block_size: tokens of a block.
        medium: the tier of the cache.
        session_id: the session that the request named; None for none.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    medium: str | None = None
    session_id: str | None = None


class BlocksRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """The cache removed blocks."""

    block_hashes: list[int]
    medium: str | None = None


class CacheCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The whole cache was emptied."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class _KvBatch(msgspec.Struct, array_like=True, gc=False):
    at_s: float
    events: list[KvEvent]


_KV_BATCHES = msgspec.msgpack.Decoder(_KvBatch)


def split_kv_message(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """The number and the payload of a message, whose frames are topic, number and payload.

    Raises:
        ValueError: the message has another number of frames.
    """
    _, number, payload = frames
    return int.from_bytes(number), payload


def decode_kv_events(payload: bytes) -> list[KvEvent]:
    """Decode one batch of KV events.

    Raises:
        ValueError: the payload is malformed.
    """
    try:
        return _KV_BATCHES.decode(payload).events
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested too deeply
        raise ValueError(f"malformed batch: {error!r}") from error


def is_device_tier(medium: str | None) -> bool:
    """Whether a tier of the cache is the device's own memory, not a lower tier."""
    return medium in _DEVICE_TIERS
