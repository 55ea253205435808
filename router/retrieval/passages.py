"""The text in which passages are inserted into messages.

A model's special tokens in passages are broken up (``ppd.marks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppd.marks import Marks

from .retriever import Passage


def message_text(passages: Sequence[Passage], marks: Marks) -> str:
    """The text of passages for the new turn's message."""
    blocks = [
        f"[{number}] {marks.broken(passage.text)}" for number, passage in enumerate(passages, 1)
    ]
    return "\n\n".join(("Passages that may help:", *blocks))


def reply_text(passage: Passage, marks: Marks) -> str:
    """The text of a passage for the middle of a reply."""
    return f"\n\n(A passage that may help: {marks.broken(passage.text)})\n\n"


def with_prefix(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A copy of ``message`` with ``text`` in front of its content."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": f"{text}\n\n"}, *content]}
    return {**message, "content": f"{text}\n\n{content or ''}"}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; parts of other kinds than text are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))
