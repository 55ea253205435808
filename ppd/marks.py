"""Marks: strings that a tokenizer or a chat template interprets as control tokens.

In untrusted text a mark could end a message and begin one of another role. The marks of most
models have a few common forms. A model's other special tokens come from its worker's description.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_COMMON_FORMS = (
    r"<[|｜][^<>]{1,64}?[|｜]>",  # <|im_start|>, <|eot_id|>, <｜User｜>
    r"</?s>",
    r"\[/?INST\]",
    r"<</?SYS>>",
    r"<(?:start|end)_of_turn>",
    r"<(?:bos|eos|pad|unk)>",
    r"</?think>",
    r"</?tool_(?:call|response)>",
)
_BREAK = "\u200b"  # zero-width space: invisible to a reader, another string to a tokenizer


class Marks:
    """Finds marks in text and breaks them up.

    Args:
        special: special tokens of the model; blank ones are ignored.
    """

    def __init__(self, special: Iterable[str] = ()) -> None:
        usable = {token for token in special if token.strip() and _BREAK not in token}
        escaped = sorted(map(re.escape, usable), key=len, reverse=True)
        self._pattern = re.compile("|".join((*escaped, *_COMMON_FORMS)))

    def broken(self, text: str) -> str:
        """Return ``text`` with every mark broken up by an invisible character."""
        while True:  # a mark that was broken up may have overlapped another
            replaced = self._pattern.sub(_break_up, text)
            if replaced == text:
                return text
            text = replaced


def _break_up(match: re.Match[str]) -> str:
    mark = match[0]
    return _BREAK.join((mark[:1], mark[1:])) if len(mark) > 1 else _BREAK


def unusual(special: Iterable[str]) -> tuple[str, ...]:
    """Select the special tokens that have none of the common forms, sorted."""
    common = Marks()
    return tuple(sorted({one for one in special if one.strip() and common.broken(one) == one}))
