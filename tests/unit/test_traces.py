"""Readers of traces, on small files written here."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from eval.traffic.chats import read_sharegpt, read_wildchat
from eval.traffic.dialogues import common_start, load_count, read_agents, read_dialogues
from eval.traffic.traces import read_azure, read_mooncake, read_sessions, with_replies
from ppd.errors import ConfigError

from .trace_rows import HEAD, READERS, request, row, turns_of, write


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


def test_replies_that_a_trace_has_left_out_are_put_back(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        [
            row(1, 1, 0.0, 0, 100, 10),
            row(1, 2, 1.0, 100, 20, 5, gap=1.0),  # the prompt before, without its reply
            row(1, 3, 2.0, 120, 7, 5, gap=1.0),
            row(1, 4, 3.0, 40, 8, 5, gap=1.0),  # its client cut the history
        ],
    )
    ((found,), _) = read_sessions(path)
    assert turns_of(found) == [(0, 100, 10), (100, 20, 5), (120, 7, 5), (40, 8, 5)]
    assert turns_of(with_replies(found)) == [(0, 100, 10), (110, 20, 5), (135, 7, 5), (40, 8, 5)]


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


# -- published chats ----------------------------------------------------------------------


def said(*texts: str) -> dict[str, Any]:
    """A chat of ShareGPT in which a human begins."""
    names = ("human", "gpt")
    talk = [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"id": "x", "conversations": talk}


def test_sharegpts_chats_are_turns_and_those_without_a_reply_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([said("1"), said("12", "123", "1", "1234"), said(), said("1", "2")]))
    assert [turns_of(one) for one in read_sharegpt(path, len)] == [
        [(0, 2, 3), (5, 1, 4)],
        [(0, 1, 1)],
    ]
    assert len(read_sharegpt(path, len, read=1)) == 1
    assert [len(one.turns) for one in read_sharegpt(path, len, min_turns=2)] == [2]
    with pytest.raises(ConfigError, match=r"s.json: no conversation has as many as 3 replies"):
        read_sharegpt(path, len, min_turns=3)


def wild(path: Path, *chats: list[dict[str, Any]]) -> Path:
    """Write chats as WildChat's release has them, without some of its columns."""
    parquet.write_table(
        pa.table({"conversation_hash": ["x"] * len(chats), "conversation": list(chats)}), path
    )
    return path


def uttered(role: str, content: str, at_s: int | None = None) -> dict[str, Any]:
    at = None if at_s is None else datetime.fromtimestamp(1_700_000_000 + at_s, UTC)
    return {"role": role, "content": content, "timestamp": at, "language": "English"}


def test_wildchats_turns_have_the_gaps_between_their_replies(tmp_path: Path) -> None:
    path = wild(
        tmp_path / "w.parquet",
        [uttered("user", "12"), uttered("assistant", "123", 50)],
        [
            uttered("user", "1"),
            uttered("assistant", "12", 20),
            uttered("user", "123"),
            uttered("assistant", "1", 65),
        ],
    )
    first, second = read_wildchat(path, len)
    assert (first.starts_at_s, second.starts_at_s) == (0, 30)
    assert turns_of(first) == [(0, 1, 2), (3, 3, 1)]
    assert [turn.gap_s for turn in first.turns] == [0, 45]
    assert turns_of(second) == [(0, 2, 3)]
    assert len(read_wildchat(path, len, min_turns=2)) == 1


def test_a_broken_file_of_wildchat_is_named(tmp_path: Path) -> None:
    path = wild(tmp_path / "w.parquet", [uttered("user", "1"), uttered("assistant", "1")])
    with pytest.raises(ConfigError, match=r"conversation 1: a reply has no timestamp"):
        read_wildchat(path, len)
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"w\.parquet: cannot be read"):
        read_wildchat(path, len)
    parquet.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(ConfigError, match="must have a column conversation"):
        read_wildchat(path, len)
    parquet.write_table(pa.table({"conversation": ["x"]}), path)
    with pytest.raises(ConfigError, match="conversation 1: Expected `array`"):
        read_wildchat(path, len)


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
