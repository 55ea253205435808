"""Readers of traces, on generated files: valid ones, broken ones and any bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.traffic.conversations import Conversation
from ppd.errors import ConfigError

from .trace_rows import (
    AGENTS,
    AZURE,
    BLOCK_TOKENS,
    DIALOGUES,
    HEAD,
    MOONCAKE,
    READERS,
    SESSIONS,
    Reader,
    request,
    row,
    turns_of,
)


def encode_lines(rows: list[dict[str, Any]]) -> list[bytes]:
    """Encode rows as lines of JSON."""
    return [json.dumps(row).encode() for row in rows]


tokens = st.integers(1, 2000)
tokens_or_zero = st.just(0) | st.integers(0, 2000)
seconds = st.floats(0, 1e9)


@st.composite
def session_lines(draw: st.DrawFn) -> list[bytes]:
    """Lines of interleaved sessions, some of which go back to an earlier turn."""
    turns: Counter[int] = Counter()
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.integers(0, 2))
        turn = draw(st.integers(1, turns[name] + 1))
        turns[name] = max(turns[name], turn)
        rows.append(
            row(name, turn, draw(seconds), draw(tokens_or_zero), draw(tokens), draw(tokens))
        )
    return encode_lines(rows)


@st.composite
def mooncake_lines(draw: st.DrawFn) -> list[bytes]:
    """Lines of requests that may begin with the blocks of others."""
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(tokens)
        count = -(-length // BLOCK_TOKENS)
        blocks = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        rows.append(request(draw(st.integers(0, 10**9)), length, draw(tokens_or_zero), blocks))
    return encode_lines(rows)


azure_lines = st.lists(
    st.builds(
        lambda at, context, output: f"{at.isoformat(' ')},{context},{output}".encode(),
        st.datetimes(),
        tokens,
        tokens_or_zero,
    ),
    min_size=1,
    max_size=6,
).map(lambda rows: [HEAD.strip().encode(), *rows])
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text(max_size=9) | st.none(),
)
dialogue_lines = st.lists(
    st.builds(
        lambda name, before, reply, after: {
            name: [*before, {"role": "assistant", "content": reply}, *after]
        },
        st.sampled_from(["messages", "traj"]),
        st.lists(messages, max_size=4),
        st.text(max_size=9),
        st.lists(messages, max_size=4),
    ),
    min_size=1,
    max_size=4,
).map(encode_lines)
agent_lines = st.lists(
    st.fixed_dictionaries(
        {
            "session_id": st.sampled_from("ab"),
            "timestamp": st.integers(0, 10**15),
            "input": st.text("ab", min_size=1, max_size=9),
            "output": st.text("ab", max_size=9),
        }
    ),
    min_size=1,
    max_size=6,
).map(encode_lines)
VALID: list[tuple[Reader, st.SearchStrategy[list[bytes]]]] = [
    (SESSIONS, session_lines()),
    (MOONCAKE, mooncake_lines()),
    (AZURE, azure_lines),
    (DIALOGUES, dialogue_lines),
    (AGENTS, agent_lines),
]
valid_files = st.one_of(*(st.tuples(st.just(reader), lines) for reader, lines in VALID))


def check_plan(found: list[Conversation]) -> None:
    """Check what must hold of conversations from any file."""
    assert found
    assert all(one.turns for one in found)
    assert min(one.starts_at_s for one in found) == 0
    assert [one.starts_at_s for one in found] == sorted(one.starts_at_s for one in found)
    for one in found:
        assert 0 <= one.shared_tokens <= one.turns[0].new_tokens
        for turn in one.turns:
            assert turn.new_tokens >= 1
            assert turn.output_tokens >= 1
            assert turn.keep_tokens is None or turn.keep_tokens >= 0
            assert 0 <= turn.gap_s < float("inf")


def check_read_or_refused(reader: Reader, path: Path) -> None:
    """Check that a file gives sound conversations or an error that names it, and no other error."""
    try:
        found = reader(path)
    except ConfigError as error:
        refusal = str(error)
    else:
        check_plan(found)
        return
    assert refusal.startswith(f"{path}:")


def sizes_in(reader: Reader, lines: list[bytes]) -> list[tuple[int, int]]:
    """Read the prompt and output tokens of each turn, as a file's own fields give them."""
    if reader is AZURE:
        fields = [line.decode().split(",") for line in lines[1:]]
        return [(int(context), max(1, int(output))) for _, context, output in fields]
    rows = [json.loads(line) for line in lines]
    if reader is SESSIONS:
        return [(row["in"], row["out"]) for row in rows]
    return [(row["input_length"], max(1, row["output_length"])) for row in rows]


@pytest.mark.parametrize(
    ("reader", "files"), VALID, ids=["sessions", "mooncake", "azure", "dialogues", "agents"]
)
@given(data=st.data())
def test_a_valid_file_is_read_whole(
    tmp_path_factory: pytest.TempPathFactory,
    reader: Reader,
    files: st.SearchStrategy[list[bytes]],
    data: st.DataObject,
) -> None:
    lines = data.draw(files)
    path = tmp_path_factory.getbasetemp() / "valid.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = reader(path)
    check_plan(found)
    turns = [turn for one in found for turn in turns_of(one)]
    if reader in (SESSIONS, MOONCAKE, AZURE):
        sizes = [(context + new, output) for context, new, output in turns]
        assert sorted(sizes) == sorted(sizes_in(reader, lines))
    elif reader is AGENTS:
        outputs = [max(1, len(json.loads(line)["output"])) for line in lines]
        assert sorted(output for _, _, output in turns) == sorted(outputs)
    else:
        assert len(found) == len(lines)


broken_lines = st.sampled_from([b"{", b"}", b"null", b"5", b'"text"', b'{"s": ', b"\xff\xfe"])


@given(valid_files, broken_lines, st.data())
def test_one_broken_line_among_valid_ones_is_named(
    tmp_path_factory: pytest.TempPathFactory,
    file: tuple[Reader, list[bytes]],
    broken: bytes,
    data: st.DataObject,
) -> None:
    reader, lines = file
    place = data.draw(st.integers(int(reader is AZURE), len(lines)))
    path = tmp_path_factory.getbasetemp() / "broken.jsonl"
    path.write_bytes(b"\n".join([*lines[:place], broken, *lines[place:]]))
    with pytest.raises(ConfigError, match=rf"broken\.jsonl:{place + 1}: "):
        reader(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
_LENGTHS = ["s", "k", "in", "ctx", "new", "out", "t", "gap", "input_length", "output_length"]
_OTHERS = ["timestamp", "hash_ids", "messages", "traj", "history", "session_id", "input", "output"]
names = st.sampled_from([*_LENGTHS, *_OTHERS])
lines = st.binary(max_size=40) | st.dictionaries(names, values).map(
    lambda row: json.dumps(row).encode()
)


@given(st.sampled_from(READERS), st.booleans(), st.lists(lines, max_size=4))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, reader: Reader, head: bool, some: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes((HEAD.encode() if head else b"") + b"\n".join(some))
    check_read_or_refused(reader, path)


@given(valid_files, st.data())
def test_a_valid_file_with_changed_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    file: tuple[Reader, list[bytes]],
    data: st.DataObject,
) -> None:
    reader, lines = file
    content = bytearray(b"\n".join(lines))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    path.write_bytes(content)
    check_read_or_refused(reader, path)
