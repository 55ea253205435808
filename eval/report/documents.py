"""Documents with tables and numbers that come from raw rows: the markers, and what is between them.

A table stands between two lines of their own::

    <!-- report:NAME -->
    <!-- /report -->

A number within a line stands between ``<!--n:NAME-->`` and ``<!--/n-->``. Both are HTML comments,
which no reader sees. This module does not know any name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppd.errors import ConfigError

_BEGIN = re.compile(r"<!-- report:(\S+) -->")
_END = "<!-- /report -->"
_LIKE_A_MARKER = re.compile(r"<!--\s*/?report\b")
_NUMBER = re.compile(r"<!--n:([^\s>]+)-->(.*?)<!--/n-->")
_LIKE_A_NUMBER = re.compile(r"<!--\s*(n:|/n\b)")
_LINE_START = re.compile(r"[\s>*+-]*<!--")  # Markdown takes such a line for HTML as a whole

Make = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Drift:
    """A table or number that is not what its rows give."""

    document: str
    name: str
    before: Sequence[str]
    after: Sequence[str]

    def diff(self) -> str:
        """Return a unified diff from the document to the rows."""
        old, new = f"{self.document} {self.name}", f"{self.name} from its rows"
        return "\n".join(difflib.unified_diff(self.before, self.after, old, new, lineterm=""))


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A document as its rows give it.

    Attributes:
        names: of all its markers.
    """

    text: str
    names: tuple[str, ...]
    drifts: tuple[Drift, ...]


def rewritten(text: str, document: str, block: Make, number: Make) -> Rewritten:
    """Return a document with all that is between its markers made anew.

    Args:
        document: its name, for errors and drifts.
        block, number: make the text of a name.

    Raises:
        ConfigError: a marker has no end or no begin, or stands where it cannot; or from ``block``
            and ``number``. The message names document and line.
    """
    lines = text.split("\n")
    kept: list[str] = []
    names: list[str] = []
    drifts: list[Drift] = []
    at, fenced = 0, False
    while at < len(lines):
        line, where = lines[at], f"{document}:{at + 1}"
        at += 1
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced:
            kept.append(line)
            continue
        if begin := _BEGIN.fullmatch(line):
            name = begin[1]
            end = _end_of(lines, at, f"{where}: report:{name}")
            before, after = lines[at:end], ["", *_made(block, name, where).split("\n"), ""]
            names.append(f"report:{name}")
            kept += [line, *after, _END]
            if before != after:
                drifts.append(Drift(document, f"report:{name}", before, after))
            at = end + 1
            continue
        if _LIKE_A_MARKER.search(line):
            raise ConfigError(f"{where}: {line.strip()} begins nothing, and ends nothing")
        new = _numbers(line, where, number, names)
        if new != line:
            changed = ", ".join(f"n:{found[1]}" for found in _NUMBER.finditer(line))
            drifts.append(Drift(document, changed, [line], [new]))
        kept.append(new)
    return Rewritten("\n".join(kept), tuple(names), tuple(drifts))


def _end_of(lines: Sequence[str], at: int, what: str) -> int:
    for number in range(at, len(lines)):
        if lines[number] == _END:
            return number
        if _LIKE_A_MARKER.search(lines[number]):
            break
    raise ConfigError(f"{what} has no {_END}")


def _numbers(line: str, where: str, number: Make, names: list[str]) -> str:
    if _LIKE_A_NUMBER.search(_NUMBER.sub("", line)):
        raise ConfigError(f"{where}: a number's marker has no begin or no end")
    if _NUMBER.search(line) and _LINE_START.match(line):
        raise ConfigError(f"{where}: a number's marker must not begin a line")

    def made(found: re.Match[str]) -> str:
        names.append(f"n:{found[1]}")
        return f"<!--n:{found[1]}-->{_made(number, found[1], where)}<!--/n-->"

    return _NUMBER.sub(made, line)


def _made(make: Make, name: str, where: str) -> str:
    try:
        return make(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error
