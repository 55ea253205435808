"""Rows of raw files as tables of documents use them: chosen by fields, with their origin.

A raw file that is missing or empty is an error here: a document must not lose its numbers silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppd.errors import ConfigError

from ..raw_rows import read_rows
from .machines import machines

Row = Mapping[str, Any]
T = TypeVar("T")


_MAX_COMMITS = 6  # that a line names one by one


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of one raw file.

    Attributes:
        file: as a document names it.
        headers: rows that tell commit, date and hardware, for rows that do not do so themselves.
    """

    file: str
    rows: tuple[Row, ...]
    headers: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows, in the order of the file."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def pick(self, wanted: Callable[[Row], bool], what: str) -> Rows:
        """Return the rows that a condition holds for.

        Args:
            what: the condition, for the error.

        Raises:
            ConfigError: there is none.
        """
        found = tuple(row for row in self.rows if wanted(row))
        if not found:
            raise ConfigError(f"{self.file}: no row has {what}")
        return Rows(self.file, found, self.headers)

    def where(self, **fields: object) -> Rows:
        """Return the rows with these values; a field that a row lacks is None.

        Raises:
            ConfigError: there is none.
        """
        what = ", ".join(f"{name} {value}" for name, value in fields.items())
        return self.pick(lambda row: all(row.get(k) == v for k, v in fields.items()), what)

    def and_also(self, others: Rows) -> Rows:
        """Return these rows and others of the same file."""
        return Rows(self.file, (*self.rows, *others.rows), self.headers)

    def groups(self, *fields: str) -> dict[tuple[Any, ...], Rows]:
        """Return the rows by the values of some fields, in the order of the file."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault(tuple(row.get(field) for field in fields), []).append(row)
        return {key: Rows(self.file, tuple(of), self.headers) for key, of in found.items()}

    def values(self, field: str) -> list[Any]:
        """Return a field's values of all rows that have one."""
        return [row[field] for row in self.rows if row.get(field) is not None]

    def newest(self) -> Rows:
        """Return all rows of the commit that was measured last."""
        last = max(self.rows, key=lambda row: str(row["at"]))
        return self.pick(lambda row: commit_of(row) == commit_of(last), "the newest commit")

    def origin(self) -> str:
        """Return one line: file, commits, dates, hardware, and what was simulated or emulated."""
        told = [row for row in self.rows if "commit" in row] or list(self.headers)
        told = sorted(told, key=lambda row: str(row["at"]))
        commits = _listed(_short_commit(row["commit"]) for row in told)
        if len(commits) > _MAX_COMMITS:
            commits = [*commits[:2], f"{len(commits) - 4} more", *commits[-2:]]
        parts = [self.file, f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"]
        parts.append(", ".join(sorted(_listed(row["at"][:10] for row in told))))
        parts.append(", ".join(sorted(_listed(_hardware(row["hardware"]) for row in told))))
        parts += machines(told)
        return "; ".join(parts)


def commit_of(row: Row) -> str:
    """Return the commit that a row was measured on, without the mark of a changed checkout."""
    return str(row["commit"]).rstrip("+")


def _short_commit(commit: str) -> str:
    return commit[:7] + "+" * commit.endswith("+")


def _hardware(told: str) -> str:
    return told.replace("1 cores", "1 core")


def _listed(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


class Results:
    """A folder of raw files, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Rows] = {}
        self._made: dict[str, Any] = {}

    def rows(self, name: str) -> Rows:
        """Return all rows of a raw file.

        Raises:
            ConfigError: it is missing, empty or broken.
        """
        if name not in self._read:
            file = f"{self.folder.name}/{name}"
            if not (self.folder / name).is_file():
                raise ConfigError(f"{file}: there is no such file")
            rows = tuple(row for _, row in read_rows(self.folder / name))
            if not rows:
                raise ConfigError(f"{file}: there are no rows in it")
            headers = tuple(row for row in rows if "commit" in row)
            self._read[name] = Rows(file, rows, headers)
        return self._read[name]

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns; it is called at the first call for a name only."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made
