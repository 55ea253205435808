"""Records that replicas exchange: their encoding, and merges in any order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.errors import ForeignFormatError, MalformedBatchError
from ppd.prefix import Anchor, hash_messages
from ppd.sessions import SessionIndex, Turn
from ppd.shared_drains import SharedDrains, later
from ppd.shared_records import (
    FORMAT,
    Batch,
    DrainRecord,
    LoadRecord,
    SharedTurn,
    decode,
    encode,
)

_COUNTS = st.integers(0, 2**31 - 1)
_DIGESTS = st.binary(min_size=16, max_size=16)
_NAMES = st.sampled_from([f"http://d{i}:1#boot.{i}" for i in range(4)])
_TURNS = st.builds(
    Turn,
    session=st.integers(0, 2**48 - 1),
    number=st.integers(1, 2**31 - 1),
    home=_NAMES,
    prompt_tokens=_COUNTS,
    completion_tokens=_COUNTS,
    prefill_worker=st.none() | _NAMES,
    prefill_tokens=_COUNTS,
    usual_reply_tokens=st.floats(0, 2**31 - 1),
    loses_replies=st.booleans(),
)
_SHARED = st.builds(
    SharedTurn,
    digest=_DIGESTS,
    turn=_TURNS,
    after=st.none() | _DIGESTS,
    anchor=st.none() | st.builds(Anchor, block=_DIGESTS, tail_bytes=st.integers(0, 1023)),
    finished_at_s=st.integers(0, 99).map(float),
    model=st.sampled_from(["a", "b"]),
)
_DRAINS = st.builds(
    DrainRecord,
    url=st.sampled_from(["http://d0:1", "http://d1:1"]),
    boot_id=st.none() | st.sampled_from(["a", "b"]),
    draining=st.booleans(),
    at_ms=st.integers(0, 5),
    origin=st.sampled_from(["x", "y"]),
)
_BATCHES = st.builds(
    Batch,
    turns=st.lists(_SHARED, max_size=5).map(tuple),
    drains=st.lists(_DRAINS, max_size=3).map(tuple),
    deleted=st.lists(st.text(max_size=50), max_size=3).map(tuple),
    loads=st.none()
    | st.lists(st.builds(LoadRecord, worker=_NAMES, tokens=_COUNTS), max_size=3).map(tuple),
)


@given(_BATCHES)
def test_what_is_encoded_is_decoded(batch: Batch) -> None:
    assert decode(encode(batch, 100.0), 100.0) == batch


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    foreign = bool(data) and data[0] != FORMAT
    with pytest.raises(ForeignFormatError if foreign else MalformedBatchError):
        decode(data, 0.0)


@given(_BATCHES, st.data())
def test_a_damaged_batch_is_refused_or_has_values_in_range(batch: Batch, data: Any) -> None:
    damaged = bytearray(encode(batch, 100.0))
    at = data.draw(st.integers(1, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged), 100.0)
    except MalformedBatchError:
        return
    for shared in found.turns:
        assert 0 <= shared.turn.prompt_tokens < 2**31
        assert 0 <= shared.turn.session < 2**48
        assert len(shared.digest) == 16


def test_workers_are_one_object_in_all_turns() -> None:
    turn = Turn(1, 1, "http://d:1#a.0", 1, 1, "http://p:1#a.0", 1, 1.0)
    first, second = (
        decode(encode(Batch(turns=(SharedTurn(bytes(16), turn),)), 0.0), 0.0).turns[0].turn
        for _ in range(2)
    )
    assert first.home is second.home
    assert first.prefill_worker is second.prefill_worker


def test_a_worker_that_the_batch_does_not_name_is_refused() -> None:
    turn = Turn(1, 1, "http://d:1#a.0", 1, 1, None, 1, 1.0)
    names, *rest = msgspec.msgpack.decode(
        encode(Batch(turns=(SharedTurn(bytes(16), turn),)), 0.0)[1:]
    )
    assert names == [turn.home, ""]
    with pytest.raises(MalformedBatchError):
        decode(bytes([FORMAT]) + msgspec.msgpack.encode([[], *rest]), 0.0)


# -- merging ---------------------------------------------------------------------------------


def _chain(number: int) -> Any:
    return hash_messages(b"", [{"role": "user", "content": f"conversation {number}"}])


@st.composite
def _orders(draw: Any) -> tuple[list[tuple[int, float, str]], list[tuple[int, float, str]]]:
    """Turns as (conversation, time of the end, home), and the same in another order."""
    times = draw(st.lists(st.integers(0, 99), unique=True, max_size=12))
    turns = [(draw(st.integers(0, 3)), float(at), draw(_NAMES)) for at in times]
    again = draw(st.permutations(turns + draw(st.lists(st.sampled_from(turns or [(0, 0.0, "")])))))
    return turns, (again if turns else [])


def _merged(turns: list[tuple[int, float, str]]) -> dict[int, tuple[str, float] | None]:
    index = SessionIndex(capacity=100, ttl_s=60.0)
    for conversation, finished_at_s, home in turns:
        turn = Turn(conversation, 1, home, 10, 5, None, 0, 5.0)
        index.merge(_chain(conversation).end, None, turn, finished_at_s, 100.0)
    known: dict[int, tuple[str, float] | None] = {}
    for conversation in range(4):
        hit = index.find(_chain(conversation), 100.0)
        known[conversation] = None if hit is None else (hit.turn.home, hit.turn.session)
    return known


@given(_orders())
def test_replicas_that_have_the_same_records_have_the_same_homes(
    orders: tuple[list[tuple[int, float, str]], list[tuple[int, float, str]]],
) -> None:
    """Whatever the order, and however often a record arrives."""
    one, other = orders
    assert _merged(one) == _merged(other)


@given(st.floats(0, 200), st.floats(0, 200))
def test_no_record_outlives_its_lifetime(finished_at_s: float, now_s: float) -> None:
    """The staleness of what is known: at most the lifetime, counted from the turn's end."""
    index = SessionIndex(capacity=100, ttl_s=60.0)
    turn = Turn(1, 1, "d", 10, 5, None, 0, 5.0)
    taken = index.merge(_chain(1).end, None, turn, finished_at_s, now_s)
    assert taken is (min(finished_at_s, now_s) + 60.0 > now_s)
    assert index.find(_chain(1), max(now_s, finished_at_s + 60.0)) is None or now_s < finished_at_s


def test_what_was_used_here_in_the_meantime_stays() -> None:
    index = SessionIndex(capacity=100, ttl_s=60.0)
    index.record(_chain(1), Turn(1, 1, "here", 10, 5, None, 0, 5.0), 10.0)
    assert not index.merge(_chain(1).end, None, Turn(2, 1, "there", 1, 1, None, 0, 1.0), 9.0, 11.0)
    assert index.merge(_chain(1).end, None, Turn(2, 1, "there", 1, 1, None, 0, 1.0), 10.5, 11.0)
    hit = index.find(_chain(1), 12.0)
    assert hit is not None
    assert hit.turn.home == "there"


def test_an_index_is_bounded_whatever_arrives() -> None:
    index = SessionIndex(capacity=10, ttl_s=60.0)
    for number in range(1000):
        turn = Turn(number, 1, "d", 10, 5, None, 0, 5.0)
        index.merge(number.to_bytes(16, "big"), None, turn, float(number % 7), 8.0)
        assert len(index) <= 10


# -- drains ----------------------------------------------------------------------------------


@given(_DRAINS, _DRAINS, _DRAINS)
def test_the_later_operation_is_a_maximum(a: DrainRecord, b: DrainRecord, c: DrainRecord) -> None:
    assert later(a, a) == a
    assert later(later(a, b), c) == later(a, later(b, c))
    winner, other = later(a, b), later(b, a)
    assert msgspec.structs.replace(winner, url="") == msgspec.structs.replace(other, url="")


@given(st.lists(_DRAINS, max_size=8), st.data())
def test_replicas_agree_on_drains(records: list[DrainRecord], data: Any) -> None:
    one, other = SharedDrains(), SharedDrains()
    for record in records:
        one.merge(record)
    for record in data.draw(st.permutations(records + records)):
        other.merge(record)
    assert {r.url: r for r in one.records} == {r.url: r for r in other.records}


def test_drains_are_bounded() -> None:
    drains = SharedDrains(max_workers=3)
    for at_ms in range(10):
        assert drains.merge(DrainRecord(f"http://d{at_ms}:1", None, True, at_ms, "x"))
    assert [record.at_ms for record in drains.records] == [7, 8, 9]
    assert not drains.merge(DrainRecord("http://d0:1", None, True, 0, "x"))
