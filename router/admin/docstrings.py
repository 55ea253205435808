"""Reads the docstrings of structures, for descriptions of their fields."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def description_of(kind: type) -> str:
    """Return the text of a class's docstring before its sections, as Markdown."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return _markdown(_SECTION.split(text)[0]).strip()


def attributes_of(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes and of those that it inherits, by name."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        parts = _SECTION.split(inspect.cleandoc(owner.__doc__ or ""))
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        for names, text in _ATTRIBUTE.findall(sections.get("Attributes", "")):
            description = _markdown(" ".join(text.split()))
            found |= dict.fromkeys(names.split(", "), description)
    return found


def _markdown(text: str) -> str:
    """Return a docstring's text with code marked as Markdown does."""
    return text.replace("``", "`")
