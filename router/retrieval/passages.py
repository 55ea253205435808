"""Passages as text of a message. A model's marks in them are broken up (``ppd.marks``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppd.marks import Marks

from .retriever import Passage


def block(passages: Sequence[Passage], marks: Marks) -> str:
    """The text that goes into a message."""
    told = [f"[{number}] {marks.broken(one.text)}" for number, one in enumerate(passages, 1)]
    return "\n\n".join(("Passages that may help:", *told))


def aside(passage: Passage, marks: Marks) -> str:
    """The text that goes into the midst of a reply."""
    return f"\n\n(A passage that may help: {marks.broken(passage.text)})\n\n"


def inserted(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """``message`` with ``text`` in front of its own content."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": f"{text}\n\n"}, *content]}
    return {**message, "content": f"{text}\n\n{content or ''}"}


def text_of(message: Mapping[str, Any]) -> str:
    """What a user has written; of parts, those that are text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    told = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in told if isinstance(text, str))
