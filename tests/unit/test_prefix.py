"""Prefix digests: what continues what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.prefix import BLOCK_BYTES, hash_ids, hash_messages, hash_text

Message = dict[str, Any]

texts = st.text(max_size=40)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=8,
)


def no_tails(_block: bytes) -> tuple[int, ...]:
    return ()


@given(messages, messages)
def test_a_continued_chat_contains_the_digest_of_the_chat(
    history: list[Message], more: list[Message]
) -> None:
    end = hash_messages(b"", history).end
    candidates = list(hash_messages(b"", history + more).candidates(no_tails))
    assert end in [c.digest for c in candidates]
    assert [c.bytes_after for c in candidates] == sorted(c.bytes_after for c in candidates)


@given(messages, st.integers(min_value=0), texts)
def test_a_changed_message_changes_every_later_digest(
    history: list[Message], at: int, text: str
) -> None:
    at %= len(history)
    edited = [dict(m) for m in history]
    edited[at]["content"] = text + "!" + history[at]["content"]
    before, after = hash_messages(b"", history).digests, hash_messages(b"", edited).digests
    assert before[:at] == after[:at]
    assert all(a != b for a, b in zip(before[at:], after[at:], strict=True))


def test_fields_cannot_run_into_each_other() -> None:
    one = hash_messages(b"", [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}])
    two = hash_messages(b"", [{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}])
    named = hash_messages(b"", [{"role": "user", "name": "x", "content": "ab"}])
    assert len({one.end, two.end, named.end}) == 3


def test_salt_separates_tenants() -> None:
    history = [{"role": "user", "content": "hello"}]
    assert hash_messages(b"a", history).end != hash_messages(b"b", history).end


@pytest.mark.parametrize(
    "dumped",
    [
        {"role": "assistant", "content": "hi", "refusal": None, "annotations": []},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "hi", "reasoning_content": "because"},
        {"role": "assistant", "content": "hi", "tool_calls": None},
    ],
)
def test_a_reply_is_the_same_however_a_client_dumps_it(dumped: Message) -> None:
    plain = hash_messages(b"", [{"role": "assistant", "content": "hi"}])
    assert hash_messages(b"", [dumped]).end == plain.end


def test_tool_calls_and_images_count() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    image = [{"type": "image_url", "image_url": {"url": "data:,a"}}]
    ends = {
        hash_messages(b"", [message]).end
        for message in (
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": image},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,b"}}]},
        )
    }
    assert len(ends) == 4


@given(st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=2 * BLOCK_BYTES))
def test_a_continued_prompt_contains_the_digest_of_the_prompt(first: bytes, more: bytes) -> None:
    prompt, continued = first.decode("latin-1"), (first + more).decode("latin-1")
    before, after = hash_text(b"", prompt), hash_text(b"", continued)
    anchor = before.anchor

    def tails(block: bytes) -> tuple[int, ...]:
        return (anchor.tail_bytes,) if block == anchor.block else ()

    found = [c for c in after.candidates(tails) if c.digest == before.end]
    assert [c.bytes_after for c in found] == [after.total_bytes - before.total_bytes]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2000), st.integers(1, 500))
def test_ids_continue_like_text(ids: list[int], cut: int) -> None:
    head = ids[: max(1, len(ids) - cut)]
    before, after = hash_ids(b"", head), hash_ids(b"", ids)
    assert before.end in [
        c.digest for c in after.candidates(lambda _block: [before.anchor.tail_bytes])
    ]


def test_text_and_ids_never_meet() -> None:
    assert hash_text(b"", "aaaa").end != hash_ids(b"", [0x61616161]).end


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_out_of_range_are_refused(bad: list[int]) -> None:
    with pytest.raises(OverflowError):
        hash_ids(b"", bad)
