"""Readers of traces, on small files written here."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.traffic.conversations import Conversation
from eval.traffic.dialogues import common_start, load_count, read_agents, read_dialogues
from eval.traffic.traces import read_azure, read_mooncake, read_sessions
from ppd.errors import ConfigError


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns_of(one: Conversation) -> list[tuple[int, int, int]]:
    """Context, new and output tokens."""
    return [
        (context, turn.new_tokens, turn.output_tokens)
        for context, turn in zip(one.contexts(), one.turns, strict=True)
    ]


def row(s: int, k: int, t: float, ctx: int, new: int, out: int, **more: Any) -> dict[str, Any]:
    return {"s": s, "k": k, "t": t, "in": ctx + new, "ctx": ctx, "new": new, "out": out, **more}


def test_sessions_have_the_traces_prompts_contexts_and_times(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        [
            row(1, 1, 5.0, 0, 100, 10),
            row(2, 1, 6.0, 0, 30, 3),
            row(1, 2, 9.0, 110, 20, 5, gap=4.0),
            row(1, 2, 11.0, 110, 50, 5, gap=6.0),  # goes back: a fork
            row(1, 3, 15.0, 90, 10, 5, gap=4.0, seen=7),  # its client cut the history
        ],
    )
    found, timed = read_sessions(path)
    assert timed
    assert [one.starts_at_s for one in found] == [0, 1, 6]
    first, second, fork = found
    assert turns_of(first) == [(0, 100, 10), (110, 20, 5), (90, 10, 5)]
    assert [turn.gap_s for turn in first.turns] == [0, 4, 4]
    assert [turn.keep_tokens for turn in first.turns] == [None, None, 90]
    assert turns_of(second) == [(0, 30, 3)]
    assert turns_of(fork) == [(0, 160, 5)]


def test_sessions_without_arrivals_are_not_timed(tmp_path: Path) -> None:
    first = row(1, 1, 0.0, 0, 100, 10) | {"t": None}
    assert read_sessions(write(tmp_path / "t.jsonl", [first]))[1] is False


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", r"t.jsonl:2: .*truncated"),
        ("[]", r"t.jsonl:2: Expected `object`"),
        ('{"s": 1}', r"t.jsonl:2: Object missing required field `k`"),
        ('{"s":1,"k":1,"t":0,"in":5,"ctx":0,"new":0,"out":1}', r"t.jsonl:2: .*>= 1.*new"),
        ('{"s":1,"k":1,"t":-1,"in":5,"ctx":0,"new":5,"out":1}', r"t.jsonl:2: .*>= 0.*t"),
        ('{"s":1,"k":1,"t":0,"in":5,"ctx":1,"new":5,"out":1}', r":2: in is 5, it must be .* 6"),
        ('{"s":1,"k":3,"t":0,"in":5,"ctx":0,"new":5,"out":1}', r":2: turn 3 of .* follows turn 1"),
        ('{"s":1,"k":1,"t":0,"in":"\xff"}', r"t.jsonl:2: "),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps(row(1, 1, 0, 0, 5, 1))
    path.write_bytes(f"{good}\n{line}\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=named):
        read_sessions(path)


def test_empty_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    with pytest.raises(ConfigError, match="empty: is empty, it must hold a row"):
        read_sessions(empty)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sessions(tmp_path)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(json.dumps(row(1, 1, 0, 0, 5, 1)).encode())[:-9])
    with pytest.raises(ConfigError, match=r"torn\.gz: cannot be read"):
        read_sessions(torn)


def request(at_ms: int, tokens: int, output: int, blocks: list[int]) -> dict[str, Any]:
    return {
        "timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": blocks,
    }  # fmt: skip


def test_mooncakes_sessions_are_rebuilt_from_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        [
            request(1000, 35, 5, [0, 1, 2, 3]),  # whole: 0, 1, 2
            request(2000, 25, 9, [0, 7, 8]),
            request(4000, 62, 8, [0, 1, 2, 4, 5, 6, 9]),  # 35 + 5, then 22 new
            request(5000, 47, 8, [0, 1, 2, 30, 31]),  # the same again: that is taken
            request(6000, 30, 0, [0, 7, 8]),  # no longer than 25 + 9: no continuation
            request(7000, 15, 1, [0, 40]),  # nothing whole but what all have
            request(8000, 18, 1, [0, 41]),
        ],
    )
    found = read_mooncake(path, 10)
    assert [turns_of(one) for one in found] == [
        [(0, 35, 5), (40, 22, 8)],
        [(0, 25, 9)],
        [(0, 47, 8)],
        [(0, 30, 1)],
        [(0, 15, 1)],
        [(0, 18, 1)],
    ]
    assert found[0].turns[1].gap_s == 3
    assert [one.starts_at_s for one in found] == [0, 1, 4, 5, 6, 7]
    assert {one.shared_tokens for one in found} == {10}


def test_mooncakes_blocks_must_be_as_many_as_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [request(0, 35, 5, [0, 1])])
    with pytest.raises(ConfigError, match=r"m.jsonl:1: 35 tokens are 4 blocks of 10, .* has 2"):
        read_mooncake(path, 10)


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_azures_rows_are_single_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        f"\ufeff{HEAD}2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,0\r\n"
    )
    found = read_azure(path)
    assert [turns_of(one) for one in found] == [[(0, 374, 44)], [(0, 396, 1)]]
    assert found[1].starts_at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("TIMESTAMP,Tokens\n1,2\n", r"a.csv:1: the columns must be TIMESTAMP,Con.*GeneratedTok"),
        (HEAD, "a.csv: has no rows"),
        (HEAD + "2023-11-16 18:15:46,5\n", "a.csv:2: must have 3 fields, has 2"),
        (HEAD + "yesterday,5,5\n", "a.csv:2: Invalid isoformat"),
        (HEAD + "2023-11-16 18:15:46,x,5\n", "a.csv:2: invalid literal"),
        (HEAD + "2023-11-16 18:15:46,0,5\n", "a.csv:2: ContextTokens must be at least 1"),
        (HEAD + "2023-11-16 18:15:46,1,5\n2023-11-16 18:15:46+00:00,1,5\n", "has a zone in some"),
    ],
)
def test_a_broken_azure_line_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_azure(path)


BLOCK_TOKENS = 512
Reader = Callable[[Path], list[Conversation]]
READERS: list[Reader] = [
    lambda path: read_sessions(path)[0],
    lambda path: read_mooncake(path, BLOCK_TOKENS),
    read_azure,
    lambda path: read_dialogues(path, len),
    lambda path: read_agents(path, len),
]
SESSIONS, MOONCAKE, AZURE, DIALOGUES, AGENTS = READERS


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


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"x": ' + "[" * 100_000)
    for reader in READERS:
        with pytest.raises(ConfigError, match="deep"):
            reader(path)


# -- text: lengths are counted in characters here -------------------------------------------

CHAT = [
    {"role": "system", "content": "12345"},
    {"role": "user", "content": "123"},
    {"role": "assistant", "content": "1234"},
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": None, "tool_calls": [{"a": 1}]},
    {"role": "tool", "content": "123456", "name": "x"},
    {"role": "assistant", "content": "1"},
    {"role": "assistant", "content": "23"},
    {"role": "user", "content": "never answered"},
]
SPOKEN = [(0, 8, 4), (12, 2, 9), (23, 6, 3)]


@pytest.mark.parametrize("name", ["messages", "traj"])
def test_dialogues_are_turns_of_the_assistant(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"id": "x", name: CHAT}])
    assert [turns_of(one) for one in read_dialogues(path, len)] == [SPOKEN]
    path.write_text(json.dumps([{name: CHAT, "reward": 1}, {name: CHAT}], indent=1))
    assert [turns_of(one) for one in read_dialogues(path, len)] == [SPOKEN, SPOKEN]


def test_mt_bench_101s_pairs_are_turns(tmp_path: Path) -> None:
    history = [{"user": "12", "bot": "123"}, {"user": "1", "bot": "1234"}]
    path = write(tmp_path / "d.jsonl", [{"task": "GR", "id": 1, "history": history}])
    assert turns_of(read_dialogues(path, len)[0]) == [(0, 2, 3), (5, 1, 4)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"id": 1}', r"d.jsonl:1: must have messages, traj or history"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "with a reply of the assistant"),
        ('{"messages": [{"content": "x"}]}', r"d.jsonl:1: Object missing required field `role`"),
        ('[{"traj": 5}]', "d.jsonl: Expected `array`"),
        ('[{"traj": []}]', "d.jsonl: dialogue 1: must have"),
    ],
)
def test_a_broken_dialogue_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_dialogues(path, len)


def test_agents_prompts_share_what_they_begin_with(tmp_path: Path) -> None:
    def call(at_us: int, prompt: str, session: str = "s") -> dict[str, Any]:
        return {"session_id": session, "timestamp": at_us, "input": prompt, "output": "123"}

    path = tmp_path / "a.jsonl.gz"
    rows = [call(3_500_000, "abcdXY"), call(1_000_000, "abcd"), call(9_000_000, "abcQ"),
            call(0, "other", "t")]  # fmt: skip
    path.write_bytes(gzip.compress("\n".join(json.dumps(one) for one in rows).encode()))
    found = read_agents(path, len)
    assert [turns_of(one) for one in found] == [
        [(0, 4, 3), (4, 2, 3), (3, 1, 3)],
        [(0, 5, 3)],
    ]
    assert [turn.gap_s for turn in found[0].turns] == [0, 2.5, 5.5]


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_the_common_start_is_the_longest(one: str, other: str) -> None:
    same = common_start(one, other)
    assert one.startswith(same)
    assert other.startswith(same)
    assert one[len(same) : len(same) + 1] != other[len(same) : len(same) + 1] or same == one


def test_tokens_are_counted_by_the_models_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    count = load_count(tmp_path)
    assert [count("a b a"), count("")] == [3, 0]
    with pytest.raises(ConfigError, match="nowhere: no such file; --tokenizer takes"):
        load_count(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_count(tmp_path)
