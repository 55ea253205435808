"""Marks: strings that a tokenizer or a chat template takes for more than text.

In somebody else's text they could end a message and speak as another role. Most models' are of a
few forms; a model's own special tokens come on top, as its worker tells them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_USUAL = (
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
    """
    Args:
        special: tokens of the model that are more than text; blank ones are left alone.
    """

    def __init__(self, special: Iterable[str] = ()) -> None:
        usable = {one for one in special if one.strip() and _BREAK not in one}
        own = sorted(map(re.escape, usable), key=len, reverse=True)
        self._found = re.compile("|".join((*own, *_USUAL)))

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


def unusual(special: Iterable[str]) -> tuple[str, ...]:
    """Those in which ``Marks()`` finds nothing to break up, in order."""
    usual = Marks()
    return tuple(sorted({one for one in special if one.strip() and usual.broken(one) == one}))
