"""Readers of conversations that are text: tau-bench, MT-Bench-101, mini-SWE agent runs.

Only the lengths count, so every reader is given the count of the model's tokenizer. The text itself
is dropped: prompts are random tokens of those lengths. Chat templates add a few tokens a message,
which are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ppd.errors import ConfigError
from ppd.extras import install

from .conversations import Conversation
from .traces import BROKEN_JSON, Seconds, TraceTurn, conversation_of, read_lines, read_rows

Count = Callable[[str], int]
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True):
    """One message of a dialogue; ``at_s`` is the end of a reply, if the file has times."""

    role: str
    content: str | None = None
    tool_calls: Any = None
    at_s: float = 0.0

    @property
    def text(self) -> str:
        """The message as the model reads or writes it: tool calls are JSON."""
        calls = msgspec.json.encode(self.tool_calls).decode() if self.tool_calls else ""
        return (self.content or "") + calls


class _Spoken(msgspec.Struct, frozen=True):
    user: str
    bot: str


class Dialogue(msgspec.Struct, frozen=True):
    """A dialogue, with the field names of plain chat files, tau-bench and MT-Bench-101."""

    messages: tuple[Message, ...] = ()
    traj: tuple[Message, ...] = ()
    history: tuple[_Spoken, ...] = ()

    @property
    def spoken(self) -> Sequence[Message]:
        """The messages, under either of the names that files use."""
        if self.history:
            pairs = [
                (Message("user", exchange.user), Message("assistant", exchange.bot))
                for exchange in self.history
            ]
            return [message for pair in pairs for message in pair]
        return self.messages or self.traj


class AgentRow(msgspec.Struct, frozen=True):
    """LMCache's agent traces: one model call, its whole prompt and reply."""

    session_id: str
    timestamp: Annotated[int, msgspec.Meta(ge=0)]  # us
    input: Annotated[str, msgspec.Meta(min_length=1)]
    output: str


def load_count(tokenizer: Path) -> Count:
    """Return a function that counts the tokens of a text.

    Args:
        tokenizer: ``tokenizer.json``, or the folder of a model that has one.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"counting tokens takes: {install('eval')}") from error
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; --tokenizer takes a tokenizer.json or its folder")
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: no tokenizer: {error}") from error
    return lambda text: len(made.encode(text, add_special_tokens=False).ids)


def read_dialogues(path: Path, count: Count) -> list[Conversation]:
    """Read dialogues from JSONL, or from one JSON array.

    All that stands before a reply of the assistant is that turn's new text. What follows the last
    reply is left out.

    Raises:
        ConfigError: a dialogue is broken, or has no reply.
    """
    dialogues = read_items(path, Dialogue)
    return [_conversation(where, dialogue.spoken, count) for where, dialogue in dialogues]


def read_items(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the items of a JSONL file or of a JSON array, and where each one is.

    Raises:
        ConfigError: the file cannot be read, or an item is broken.
    """
    first = next(line for _, line in read_lines(path))
    if not first.lstrip().startswith(b"["):
        yield from ((f"{path}:{number}", row) for number, row in read_rows(path, kind))
        return
    text = b"".join(line for _, line in read_lines(path))
    try:
        whole: list[T] = msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except BROKEN_JSON as error:
        raise ConfigError(f"{path}: {error}") from error
    yield from ((f"{path}: dialogue {number}", item) for number, item in enumerate(whole, 1))


def _conversation(where: str, messages: Sequence[Message], count: Count) -> Conversation:
    turns = turns_of(messages, count)
    if not turns:
        raise ConfigError(
            f"{where}: must have messages, traj or history with a reply of the assistant"
        )
    return conversation_of(turns)


def turns_of(messages: Sequence[Message], count: Count) -> list[TraceTurn]:
    """Return the turns of a dialogue, one for each reply of the assistant.

    All text before a reply is new text of its turn. Replies without a message between them are one.
    Text after the last reply is left out. The gap between two turns is that between the ends of
    their replies.
    """
    turns: list[TraceTurn] = []
    new: int | None = None  # tokens since the last reply
    end_s = 0.0
    for message in messages:
        tokens = count(message.text)
        if message.role != "assistant":
            new = (new or 0) + tokens
        elif new is None and turns:  # the reply before continues
            turns[-1] = replace(turns[-1], output_tokens=turns[-1].output_tokens + tokens)
        else:
            held = turns[-1].prompt_tokens + turns[-1].output_tokens if turns else 0
            gap_s = max(0.0, message.at_s - end_s) if turns else 0.0
            turns.append(TraceTurn(held + max(1, new or 0), held, max(1, tokens), gap_s))
            new, end_s = None, message.at_s
    return turns


def read_agents(path: Path, count: Count) -> list[Conversation]:
    """Read the sessions of agents from their calls.

    Calls of one session are in order of time. What a call's prompt has in common with the one
    before is its context. Sessions have no time of arrival that could be compared: runs of several
    days are in one file.

    Raises:
        ConfigError: a line is broken.
    """
    sessions: dict[str, list[AgentRow]] = {}
    for _, row in read_rows(path, AgentRow):
        sessions.setdefault(row.session_id, []).append(row)
    found = []
    for rows in sessions.values():
        turns: list[TraceTurn] = []
        before: AgentRow | None = None
        for row in sorted(rows, key=lambda row: row.timestamp):
            same = common_start(before.input, row.input) if before else ""
            gap_s: Seconds = (row.timestamp - before.timestamp) / 1e6 if before else 0.0
            context = count(same) if same else 0
            new = max(1, count(row.input[len(same) :]))
            turns.append(TraceTurn(context + new, context, max(1, count(row.output)), gap_s))
            before = row
        found.append(conversation_of(turns))
    return found


def common_start(one: str, other: str) -> str:
    """The longest text that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: prompts are long, and mostly one begins with the other
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]
