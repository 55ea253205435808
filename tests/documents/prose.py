"""The length of lines and sentences.

Code blocks, tables and the origin of a table's rows are no prose, so their sentences are not
counted. A line may be longer than
the limit if it is a row of a table, or if it holds nothing but one link: neither can be broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .markdown import is_table_row, paragraphs, plain
from .settings import Settings

_ABBREVIATIONS = ("e.g.", "i.e.", "cf.", "vs.", "etc.", "al.", "no.", "sec.", "fig.")
_ORIGIN = "<sub>Rows: "  # of a block that the report makes
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_ONE_LINK = re.compile(
    r"[-*+\d.) >]*(?:!?\[[^\]]*\]\(\S+\)|\[[^\]]+\]:\s*\S+|<?https?://\S+>?)[.,;:]?"
)


def problems(text: str, settings: Settings) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of everything that is too long."""
    for number, line in enumerate(text.split("\n"), 1):
        breakable = not is_table_row(line) and not _ONE_LINK.fullmatch(line.strip())
        if len(line) > settings.max_columns and breakable:
            yield number, f"{len(line)} characters in a line, at most {settings.max_columns}"
    for paragraph in paragraphs(text):
        if paragraph.text.startswith(_ORIGIN):
            continue
        for sentence in sentences(plain(paragraph.text)):
            count = words(sentence)
            if count > settings.max_words:
                shown = " ".join(sentence.split()[:6])
                yield paragraph.line, f"{count} words in “{shown} …”, at most {settings.max_words}"


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without markup."""
    begin = 0
    for end in _END.finditer(text):
        sentence = text[begin : end.start()]
        if not sentence.lower().endswith(_ABBREVIATIONS):
            yield sentence
            begin = end.end()
    if text[begin:].strip():
        yield text[begin:]


def words(sentence: str) -> int:
    """The number of words: what stands between spaces and has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())
