"""The document of symptoms: its tables list what the code has, and its log lines are the code's.

A table whose first column is headed ``reason``, ``refusal`` or ``fallback`` must have one row for
each member of the enumeration. Lines of blocks of the language ``log``, and code in a column
headed ``the message``, must be texts of the source. Words in capitals stand for values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path

from ppd.contract import RefusalReason
from ppd.decision import Reason
from router.workers.fallbacks import Fallback

from .markdown import code_blocks, is_table_row

NAME = "docs/TROUBLESHOOTING.md"
_LISTED: dict[str, type[StrEnum]] = {
    "reason": Reason,
    "refusal": RefusalReason,
    "fallback": Fallback,
}
_MESSAGES = "the message"
_VALUES = re.compile(
    r"\.\.\.|(?<![A-Za-z_])(?:ADDRESS|COMMAND|ERROR|HOST|MODELS|MODE|NAMES|NAME|N|OPTION|PORT|PROBLEM|"
    r"REASON|REFUSAL|RID|ROLE|SHAPE|STATUS|TEXT|TIER|URL|VERSIONS|VERSION|WHAT)(?![A-Z_])"
)
_FORMAT = re.compile(r"%[-\d.]*[a-z]")
_SPAN = re.compile(r"`([^`]+)`")
_SOURCES = ("ppd", "router", "sglang_patches")


def problems(root: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of what is missing, unknown or worded otherwise."""
    for line, header, rows in _tables(text):
        if header[0] in _LISTED:
            yield from ((line, p) for p in _differences(header[0], rows))
        if _MESSAGES in header:
            column = header.index(_MESSAGES)
            for number, row in enumerate(rows, line + 2):
                for message in _SPAN.findall(row[column])[:1]:
                    if not _is_in_source(root, message):
                        yield number, f"no message of the code is {message!r}"
    for block in code_blocks(text):
        if block.language == "log":
            for number, logged in enumerate(block.lines, block.line):
                if not _is_in_source(root, logged):
                    yield number, f"no line of the log is {logged!r}"


def _differences(what: str, rows: list[list[str]]) -> Iterator[str]:
    named = [span for row in rows for span in _SPAN.findall(row[0])]
    known = {member.value for member in _LISTED[what]}
    yield from (f"there is no {what} {name}" for name in named if name not in known)
    yield from (f"{what} {name} is not in the table" for name in sorted(known - set(named)))


def _tables(text: str) -> Iterator[tuple[int, list[str], list[list[str]]]]:
    """Yield the line of the header, its cells, and the cells of each row."""
    rows: list[list[str]] = []
    first = 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if is_table_row(line):
            first = first if rows else number
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            yield first, rows[0], rows[2:]
            rows = []


def _is_in_source(root: Path, message: str) -> bool:
    parts = [re.escape(part) for part in _VALUES.split(message)]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.fullmatch(text) for text in _texts(root))


@cache
def _texts(root: Path) -> tuple[str, ...]:
    """The texts of the source, with a mark in place of each value."""
    found: set[str] = set()
    for top in _SOURCES:
        for path in (root / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(_FORMAT.sub("\0", node.value))
                elif isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                    found.add("".join(map(str, parts)))
    return tuple(found)
