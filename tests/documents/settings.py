"""The settings of the checks, ``[tool.ppd-documents]`` of ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the checks.

    Attributes:
        max_columns: of a line.
        max_words: of a sentence.
        conforming: documents whose lines and sentences are checked.
        unchecked_paths: documents that may name files that no longer exist.
    """

    max_columns: int
    max_words: int
    conforming: tuple[str, ...]
    unchecked_paths: tuple[str, ...]


def read_settings(root: Path) -> Settings:
    """Read the settings of a checkout."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ppd-documents"]
    return msgspec.convert(
        {name.replace("-", "_"): value for name, value in table.items()}, Settings
    )


def documents(root: Path) -> list[Path]:
    """All documents of a checkout, by name."""
    return sorted(
        {
            *root.glob("*.md"),
            *root.glob("tables/*.md"),
            *root.glob("deploy/**/*.md"),
            *(root / "docs").rglob("*.md"),
            *root.glob(".github/**/*.md"),
        }
    )
