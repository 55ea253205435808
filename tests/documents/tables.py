"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; line breaks and bars in cells are replaced."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def code(text: object) -> str:
    """A code span; nothing for an empty text."""
    return f"`{text}`" if str(text) else ""


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop; nothing for an empty text."""
    text = " ".join(text.split()).replace("``", "`")
    if not text:
        return ""
    if text.partition(" ")[0].rstrip(",:;").isalpha():  # a name in code keeps its letters
        text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else f"{text}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
