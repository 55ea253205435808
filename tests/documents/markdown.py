"""The parts of a Markdown document that the checks look at: prose, headings, links, code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+(?:\[[ x]\]\s+)?")
_LINK = re.compile(
    r"!?\[((?:[^\[\]]|\[[^\[\]]*\](?:\([^()]*\))?)*)\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"
)
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph, or one item of a list.

    Attributes:
        line: number of its first line, from 1.
        last_line: number of its last line.
        text: its lines, joined by spaces.
    """

    line: int
    last_line: int
    text: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link or an image.

    Attributes:
        line: number of the line where it begins, from 1.
        target: address, with its fragment.
    """

    line: int
    target: str


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block.

    Attributes:
        line: number of its first line of code, from 1.
        language: the word behind the fence; "" if there is none.
        lines: its lines.
        executed: whether the comment before it asks for its commands to be executed.
    """

    line: int
    language: str
    lines: tuple[str, ...]
    executed: bool


_EXECUTED = "<!-- executed -->"


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the fenced blocks; lines that belong to a list are not indented."""
    fence, first, language, executed = "", 0, "", False
    before, inside = "", list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        found = _FENCE.match(line)
        if fence and found and found[1].startswith(fence) and not line.strip(" `~"):
            yield CodeBlock(first, language, tuple(inside), executed)
            fence, before, inside = "", "", []
        elif fence:
            inside.append(line)
        elif found:
            fence, first, executed = found[1], number + 1, before == _EXECUTED
            language = line[found.end() :].strip()
        elif line.strip():
            before = line.strip()


def without_code(text: str) -> str:
    """The document with fenced blocks and comments blanked out; lines keep their numbers."""
    lines, fence = [], ""
    for line in _COMMENT.sub(_blank, text).split("\n"):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
            lines.append("")
        elif found:
            fence = found[1]
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def is_table_row(line: str) -> bool:
    """Whether a line is a row of a table."""
    return line.lstrip(" >").startswith("|")


def paragraphs(text: str) -> Iterator[Paragraph]:
    """Yield the paragraphs, without headings, tables and code blocks."""
    first, parts = 0, list[str]()
    for number, line in enumerate([*without_code(text).split("\n"), ""], 1):
        line = line.lstrip(" >") if line.startswith(">") else line
        ends = not line.strip() or is_table_row(line) or _HEADING.match(line)
        item = _LIST_ITEM.match(line)
        if (ends or item) and parts:
            yield Paragraph(first, number - 1, " ".join(parts))
            parts = []
        if ends:
            continue
        if not parts:
            first = number
        parts.append((line[item.end() :] if item else line).strip())


def plain(text: str) -> str:
    """A paragraph's text without markup; a code span is one word."""
    text = _CODE_SPAN.sub("Code", text)
    text = _LINK.sub(lambda link: "" if link[0].startswith("!") else link[1], text)
    return re.sub(r"[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?!\w)", "", text)


def links(text: str) -> Iterator[Link]:
    """Yield the links outside of code."""
    visible = _CODE_SPAN.sub(_blank, without_code(text))
    pending = [(0, visible)]
    while pending:
        offset, part = pending.pop()
        for link in _LINK.finditer(part):
            yield Link(visible.count("\n", 0, offset + link.start()) + 1, link[2])
            pending.append((offset + link.start(1), link[1]))  # the image of a link
    for reference in _REFERENCE.finditer(visible):
        yield Link(visible.count("\n", 0, reference.start()) + 1, reference[1])


def code_spans(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the content of every code span."""
    visible = without_code(text)
    for span in _CODE_SPAN.finditer(visible):
        yield visible.count("\n", 0, span.start()) + 1, span[2].strip()


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, by the rule that code hosts have, and of its HTML."""
    visible = without_code(text)
    found: set[str] = set(_HTML_ANCHOR.findall(visible))
    for line in visible.split("\n"):
        if heading := _HEADING.match(line):
            found.add(_unused(slug(heading[2]), found))
    return found


def slug(heading: str) -> str:
    """The anchor of a heading."""
    text = _LINK.sub(lambda link: link[1], heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def _unused(anchor: str, taken: set[str]) -> str:
    number, free = 0, anchor
    while free in taken:
        number += 1
        free = f"{anchor}-{number}"
    return free


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
