"""Files of raw rows: JSONL that runs append to, and that tables and figures are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from ppd.errors import ConfigError

Write = Callable[[dict[str, Any]], None]


def end_last_line(out: Path) -> None:
    """Cut off a last line that a kill has left unfinished."""
    if out.exists() and (data := out.read_bytes()) and not data.endswith(b"\n"):
        out.write_bytes(data[: data.rfind(b"\n") + 1])


@contextmanager
def appending(out: Path | None) -> Iterator[Write]:
    """Yield a function that appends rows, each whole or not at all; without a file it does nothing.

    Raises:
        ConfigError: the file cannot be written. The function raises it, too.
    """
    if out is None:
        yield lambda row: None
        return
    try:
        end_last_line(out)
        file = out.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    with file:
        yield lambda row: _write_whole(file, out, [row])


def append_whole(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append all of ``rows``, or none of them.

    Raises:
        ConfigError: they cannot be written; the file is as it was.
    """
    try:
        with out.open("ab", buffering=0) as file:
            _write_whole(file, out, rows)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error


def _write_whole(file: FileIO, out: Path, rows: Sequence[dict[str, Any]]) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    size = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        os.truncate(file.fileno(), size)
        raise ConfigError(
            f"{out}: cannot be written: {error}; what was written before is kept"
        ) from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with its line's number; a last line that a kill cut short is left out.

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
