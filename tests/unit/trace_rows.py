"""Rows and files of traces that tests write, and the readers that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.traffic.chats import read_sharegpt, read_wildchat
from eval.traffic.conversations import Conversation
from eval.traffic.dialogues import read_agents, read_dialogues
from eval.traffic.traces import read_azure, read_mooncake, read_sessions

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"  # of Azure's files
BLOCK_TOKENS = 512  # of Mooncake's files
Reader = Callable[[Path], list[Conversation]]
READERS: list[Reader] = [
    lambda path: read_sessions(path)[0],
    lambda path: read_mooncake(path, BLOCK_TOKENS),
    read_azure,
    lambda path: read_dialogues(path, len),
    lambda path: read_agents(path, len),
    lambda path: read_sharegpt(path, len),
    lambda path: read_wildchat(path, len),
]
SESSIONS, MOONCAKE, AZURE, DIALOGUES, AGENTS = READERS[:5]


def write(path: Path, rows: list[Any]) -> Path:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns_of(one: Conversation) -> list[tuple[int, int, int]]:
    """Read the context, new and output tokens of each turn."""
    return [
        (context, turn.new_tokens, turn.output_tokens)
        for context, turn in zip(one.contexts(), one.turns, strict=True)
    ]


def row(s: int, k: int, t: float, ctx: int, new: int, out: int, **more: Any) -> dict[str, Any]:
    """Make a row of a trace of sessions: turn ``k`` of session ``s`` at ``t`` seconds."""
    return {"s": s, "k": k, "t": t, "in": ctx + new, "ctx": ctx, "new": new, "out": out, **more}


def request(at_ms: int, tokens: int, output: int, blocks: list[int]) -> dict[str, Any]:
    """Make a row of Mooncake's trace."""
    return {
        "timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": blocks,
    }  # fmt: skip
