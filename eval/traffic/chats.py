"""Readers of published chats: ShareGPT and WildChat, in the formats of their releases.

As in ``dialogues``, only the lengths of the text count. Both releases have conversations without a
reply, which are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec

from ppd.errors import ConfigError
from ppd.extras import install

from .conversations import Conversation
from .dialogues import Count, Message, read_items, turns_of
from .traces import conversation_of

_ASSISTANTS = frozenset({"gpt", "chatgpt", "bing", "bard", "assistant"})
_CONVERSATION = "conversation"
_ROWS = 256  # conversations that are unpacked at once


class _Said(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str | None = None


class _SharedChat(msgspec.Struct, frozen=True):
    """ShareGPT: huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered."""

    conversations: tuple[_Said, ...]


class _Utterance(msgspec.Struct, frozen=True):
    """WildChat-1M: huggingface.co/datasets/allenai/WildChat-1M; replies have a timestamp."""

    role: str
    content: str | None = None
    timestamp: datetime | None = None


def read_sharegpt(
    path: Path, count: Count, read: int | None = None, min_turns: int = 1
) -> list[Conversation]:
    """Read chats of ShareGPT, a JSON array; they have no times.

    Args:
        path: as ``ShareGPT_V3_unfiltered_cleaned_split.json``.
        count: counts the tokens of a text.
        read: maximum number of conversations; None: all.
        min_turns: conversations with fewer replies are left out.

    Raises:
        ConfigError: the file is broken, or no conversation is left.
    """
    chats = (
        [
            Message("assistant" if said.speaker in _ASSISTANTS else "user", said.value)
            for said in chat.conversations
        ]
        for _, chat in read_items(path, _SharedChat)
    )
    return [chat for _, chat in _chosen(path, chats, count, read, min_turns)]


def read_wildchat(
    path: Path, count: Count, read: int | None = None, min_turns: int = 1
) -> list[Conversation]:
    """Read chats of WildChat-1M, a Parquet file, with the times at which their replies ended.

    Arguments and errors are those of :func:`read_sharegpt`. A reply without a timestamp, and an
    installation without ``pyarrow``, are errors, too.
    """
    chosen = list(_chosen(path, _wild_chats(path), count, read, min_turns))
    starts_s = [
        next(message.at_s for message in messages if message.role == "assistant")
        for messages, _ in chosen
    ]
    begin_s = min(starts_s)
    found = [
        replace(conversation, starts_at_s=start_s - begin_s)
        for (_, conversation), start_s in zip(chosen, starts_s, strict=True)
    ]
    return sorted(found, key=lambda conversation: conversation.starts_at_s)


def _chosen(
    path: Path,
    chats: Iterable[Sequence[Message]],
    count: Count,
    read: int | None,
    min_turns: int,
) -> Iterator[tuple[Sequence[Message], Conversation]]:
    found = 0
    for messages in chats:
        if len(turns_of(messages, len)) < min_turns:
            continue
        yield messages, conversation_of(turns_of(messages, count))
        found += 1
        if found == read:
            return
    if not found:
        raise ConfigError(f"{path}: no conversation has as many as {min_turns} replies")


def _wild_chats(path: Path) -> Iterator[list[Message]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"WildChat's files take: {install('pool')}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if _CONVERSATION not in file.schema_arrow.names:
                raise ConfigError(f"{path}: must have a column {_CONVERSATION}")
            for batch in file.iter_batches(_ROWS, columns=[_CONVERSATION]):
                for chat in batch.column(_CONVERSATION).to_pylist():
                    number += 1
                    yield [_message(one) for one in msgspec.convert(chat, list[_Utterance])]
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:  # msgspec's own is one
        raise ConfigError(f"{path}: conversation {number}: {error}") from error


def _message(one: _Utterance) -> Message:
    if one.role != "assistant":
        return Message("user", one.content)
    if one.timestamp is None:
        raise ValueError("a reply has no timestamp")
    return Message("assistant", one.content, at_s=one.timestamp.timestamp())
