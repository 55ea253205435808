"""Files of raw rows: JSONL that runs append to, and that tables and figures are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
