"""Passages as text of a message: what they look like there, and what they must not do there.

A tokenizer takes special tokens in any text for what they are: a passage with a chat template's
marks could end its message and speak as somebody else. Such marks are broken up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .retriever import Passage

# The marks of usual chat templates; ``special`` tokens of the model served come on top.
_MARKS = (
    r"<[|｜][^<>]{1,64}?[|｜]>",  # <|im_start|>, <|eot_id|>, <｜User｜>
    r"</?s>",
    r"\[/?INST\]",
    r"<</?SYS>>",
    r"<(?:start|end)_of_turn>",
    r"<(?:bos|eos|pad|unk)>",
    r"</?think>",
    r"</?tool_(?:call|response)>",
)
_BREAK = "\u200b"  # zero-width space: nothing to a reader, another string to a tokenizer


class Marks:
    """Args:
    special: tokens of the model that are more than text.
    """

    def __init__(self, special: Iterable[str] = ()) -> None:
        usable = (one for one in special if one.strip() and _BREAK not in one)
        own = sorted(map(re.escape, usable), key=len, reverse=True)
        self._found = re.compile("|".join((*own, *_MARKS)))

    def broken(self, text: str) -> str:
        """``text`` in which no mark is left; it reads the same."""
        while True:  # what is broken up may have hidden another
            again = self._found.sub(_broken, text)
            if again == text:
                return text
            text = again


def _broken(found: re.Match[str]) -> str:
    mark = found[0]
    return _BREAK.join((mark[:1], mark[1:])) if len(mark) > 1 else _BREAK


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
