"""Records of finished turns that routers exchange, and their encoding.

A record has digests, names of workers, ids and counts; it never has text of a prompt or a reply.
The encoding is a byte with the format's number, then MessagePack. A batch has each name once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from ppd.errors import ForeignFormatError, MalformedBatchError
from ppd.prefix import Anchor, Digest
from ppd.sessions import Turn

FORMAT = 1  # a change of the structures below needs another number
DIGEST_BYTES = 16
_MAX_COUNT = 2**31
_MAX_SESSION = 2**48

_Count = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_COUNT)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class SharedTurn(msgspec.Struct, frozen=True, gc=False):
    """A turn that a router has finished.

    Attributes:
        digest: of the turn's whole input.
        turn: what is known of the conversation.
        after: digest of the turn that it continued; None if it continued none.
        anchor: the end of a prompt; None for a chat.
        finished_at_s: time of its end, by the clock of the process that has the record.
        model: that served it.
    """

    digest: Digest
    turn: Turn
    after: Digest | None = None
    anchor: Anchor | None = None
    finished_at_s: float = 0.0
    model: str = ""


class DrainRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operator's last drain or resumption of a worker.

    Attributes:
        url: of the worker.
        boot_id: of its process; None if the worker reports none.
        draining: whether the worker is drained.
        at_ms: time of the operation, of the wall clock.
        origin: router that the operator called.
    """

    url: str
    boot_id: str | None
    draining: bool
    at_ms: Annotated[int, msgspec.Meta(ge=0)]
    origin: str


class LoadRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that a router has sent to a worker to prefill, and that are not answered.

    Attributes:
        worker: identity of the worker.
        tokens: that are not answered.
    """

    worker: str
    tokens: _Count


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records that a router writes together.

    Attributes:
        turns: finished turns, the oldest first.
        drains: operations on workers.
        deleted: names of stored responses that clients have deleted.
        loads: all of the router's loads above 0; None: they are as before.
    """

    turns: tuple[SharedTurn, ...] = ()
    drains: tuple[DrainRecord, ...] = ()
    deleted: tuple[str, ...] = ()
    loads: tuple[LoadRecord, ...] | None = None


class _WireTurn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A turn as it is encoded; workers and models are positions in the batch's list of names."""

    digest: _Digest
    after: _Digest | None
    block: _Digest | None
    tail_bytes: _Count
    session: Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SESSION)]
    number: Annotated[int, msgspec.Meta(ge=1, lt=_MAX_COUNT)]
    home: _Count
    prompt_tokens: _Count
    completion_tokens: _Count
    prefill_worker: _Count | None
    prefill_tokens: _Count
    usual_reply_tokens: Annotated[float, msgspec.Meta(ge=0, le=_MAX_COUNT)]
    loses_replies: bool
    age_ms: _Count
    model: _Count


class _WireBatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    names: list[str]
    turns: list[_WireTurn]
    drains: list[DrainRecord]
    deleted: list[str]
    loads: list[LoadRecord] | None


def encode(batch: Batch, now_s: float) -> bytes:
    """Encode a batch.

    Args:
        batch: the records.
        now_s: by the clock of ``SharedTurn.finished_at_s``.
    """
    positions: dict[str, int] = {}
    turns = []
    for shared in batch.turns:
        turn, anchor, prefill_worker = shared.turn, shared.anchor, None
        if turn.prefill_worker is not None:
            prefill_worker = positions.setdefault(turn.prefill_worker, len(positions))
        # The fields of a _WireTurn. A tuple takes a third of the time.
        turns.append(
            (
                shared.digest,
                shared.after,
                None if anchor is None else anchor.block,
                0 if anchor is None else anchor.tail_bytes,
                turn.session,
                turn.number,
                positions.setdefault(turn.home, len(positions)),
                turn.prompt_tokens,
                turn.completion_tokens,
                prefill_worker,
                turn.prefill_tokens,
                turn.usual_reply_tokens,
                turn.loses_replies,
                max(0, min(int(1e3 * (now_s - shared.finished_at_s)), _MAX_COUNT - 1)),
                positions.setdefault(shared.model, len(positions)),
            )
        )
    wire = (list(positions), turns, batch.drains, batch.deleted, batch.loads)
    return bytes([FORMAT]) + msgspec.msgpack.encode(wire)


def decode(data: bytes, written_at_s: float) -> Batch:
    """Decode a batch.

    Args:
        data: as ``encode`` returned it.
        written_at_s: time at which it was encoded, by this process's clock.

    Raises:
        ForeignFormatError: it has another format.
        MalformedBatchError: it is damaged, or a value is out of range.
    """
    if not data:
        raise MalformedBatchError("an empty batch")
    if data[0] != FORMAT:
        raise ForeignFormatError(data[0], FORMAT)
    try:
        wire = msgspec.msgpack.decode(memoryview(data)[1:], type=_WireBatch)
        # All turns of an index share the one string of a worker.
        names = [sys.intern(name) for name in wire.names]
        turns = tuple(_turn(turn, names, written_at_s) for turn in wire.turns)
    except (msgspec.DecodeError, ValueError, IndexError) as error:  # also of UTF-8
        raise MalformedBatchError(f"a batch that cannot be decoded: {error}") from error
    return Batch(
        turns=turns,
        drains=tuple(wire.drains),
        deleted=tuple(wire.deleted),
        loads=None if wire.loads is None else tuple(wire.loads),
    )


def _turn(wire: _WireTurn, names: list[str], written_at_s: float) -> SharedTurn:
    turn = Turn(
        wire.session,
        wire.number,
        names[wire.home],
        wire.prompt_tokens,
        wire.completion_tokens,
        None if wire.prefill_worker is None else names[wire.prefill_worker],
        wire.prefill_tokens,
        wire.usual_reply_tokens,
        wire.loses_replies,
    )
    anchor = None if wire.block is None else Anchor(wire.block, wire.tail_bytes)
    finished_at_s = written_at_s - wire.age_ms / 1e3
    return SharedTurn(wire.digest, turn, wire.after, anchor, finished_at_s, names[wire.model])
