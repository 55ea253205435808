"""Files of raw rows: JSONL that runs append to, and that tables and figures are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppd.errors import ConfigError

Write = Callable[[dict[str, Any]], None]


def end_last_line(out: Path) -> None:
    """After a kill in mid-write: what follows must not be glued to it."""
    if out.exists() and (data := out.read_bytes()) and not data.endswith(b"\n"):
        out.write_bytes(data[: data.rfind(b"\n") + 1])


@contextmanager
def appending(out: Path | None) -> Iterator[Write]:
    """Each row is written as it comes; without a file, none is.

    Raises:
        ConfigError: it cannot be written.
    """
    if out is None:
        yield lambda row: None
        return
    try:
        end_last_line(out)
        file = out.open("a", buffering=1)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    with file:
        yield lambda row: print(json.dumps(row), file=file)


def append_whole(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All of ``rows``, or none of them.

    Raises:
        ConfigError: they cannot be written; the file is as it was.
    """
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        size = out.stat().st_size if out.exists() else 0
        with out.open("ab", buffering=0) as file:
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                os.truncate(out, size)
                raise
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written: {error}; what was written before is kept"
        ) from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its line's number. A last line that a kill cut short is left out.

    Raises:
        ConfigError: it cannot be read, or a line is no JSON object; the message names both.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ConfigError(f"{path}:{number}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: must be a JSON object, is {type(row).__name__}")
        yield number, row
