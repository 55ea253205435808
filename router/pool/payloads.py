"""What belongs to each vector, in SQLite: the user's id, text, metadata; and which rows live.

A row's key is never used again, so an index file whose keys are not all here has rows that were
deleted since. Rows added since carry their vector. That makes the two files one: whatever was
committed here is what a restart finds.

Each thread reads through a connection of its own, and sees what was committed last: no transaction
and nobody's long scan is waited for.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppd.ann.space import Rows
from ppd.errors import IndexFileError

from .filters import Filter, field_sql

_SCHEMA = """
create table if not exists rows (
  key integer primary key autoincrement,
  id text not null unique,
  text text,
  metadata text,
  vector blob);
create index if not exists added on rows (key) where vector is not null;
create table if not exists state (one integer primary key check (one = 1), generation integer);
"""


@dataclass(frozen=True, slots=True)
class Payload:
    id: str
    text: str | None = None
    metadata: dict[str, Any] | None = None


class Payloads:
    """
    Raises:
        IndexFileError: at any call; the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._wrapped():
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")  # what was answered outlives a power cut
            self._db.executescript(_SCHEMA)
            last = self._db.execute("select seq from sqlite_sequence").fetchone()
        self._last_key = 0 if last is None else int(last[0])
        self._own = threading.local()
        self._readers: list[sqlite3.Connection] = []

    def close(self) -> None:
        """When nobody reads any more."""
        with self._lock:
            for one in (*self._readers, self._db):
                one.close()

    def new_keys(self, count: int) -> NDArray[np.int64]:
        """Never given before, ascending."""
        with self._lock:
            first = self._last_key + 1
            self._last_key += count
        return np.arange(first, first + count, dtype=np.int64)

    def index(self, name: str) -> None:
        """For filters on that field of metadata.

        Raises:
            RequestError: there cannot be such a field.
        """
        with self._wrapped():
            self._db.execute(f'create index if not exists "by {name}" on rows ({field_sql(name)})')

    def generation(self) -> int:
        """Number of the index file that belongs to the rows; 0: none yet."""
        with self._wrapped():
            found = self._db.execute("select generation from state").fetchone()
        return 0 if found is None else int(found[0])

    def keys(self) -> NDArray[np.int64]:
        with self._wrapped():
            found = self._db.execute("select key from rows order by key").fetchall()
        return np.array(found, np.int64).reshape(-1)

    def added(self) -> tuple[NDArray[np.int64], Rows | None]:
        """Keys and vectors, as users gave them, of rows that came after the index file."""
        with self._wrapped():
            found = self._db.execute(
                "select key, vector from rows where vector is not null order by key"
            ).fetchall()
        if not found:
            return np.empty(0, np.int64), None
        vectors = np.stack([np.frombuffer(vector, np.float32) for _, vector in found])
        return np.array([key for key, _ in found], np.int64), vectors

    def insert(self, payloads: Iterable[Payload]) -> NDArray[np.int64]:
        """Rows of an index that is being built: their keys, in order.

        Raises:
            IndexFileError: an id comes twice.
        """
        with self._transaction():
            keys = [
                self._db.execute(
                    "insert into rows (id, text, metadata) values (?, ?, ?)", _columns(one)
                ).lastrowid
                for one in payloads
            ]
        return np.array(keys, np.int64)

    def upsert(
        self, keys: NDArray[np.int64], payloads: Sequence[Payload], vectors: Rows
    ) -> list[int]:
        """Keys of the rows they replace.

        Args:
            keys: as ``new_keys`` gives them.
        """
        rows = [
            (key, *_columns(one), vector.astype(np.float32).tobytes())
            for key, one, vector in zip(keys.tolist(), payloads, vectors, strict=True)
        ]
        with self._transaction():
            old = self._delete([one.id for one in payloads])
            self._db.executemany(
                "insert into rows (key, id, text, metadata, vector) values (?, ?, ?, ?, ?)", rows
            )
        return old

    def delete(self, ids: Sequence[str]) -> list[int]:
        """Keys of those that were there."""
        with self._transaction():
            return self._delete(ids)

    def delete_matching(self, wanted: Filter) -> list[int]:
        """Keys of those that were there."""
        condition, values = wanted.sql()
        with self._transaction():
            gone = self._db.execute(f"delete from rows where {condition} returning key", values)
            return [key for (key,) in gone.fetchall()]

    def adopt(self, generation: int, keys: NDArray[np.int64]) -> None:
        """An index file with the rows ``keys`` is the one that belongs to the rows now."""
        with self._transaction():
            self._db.execute("create temp table if not exists held (key integer primary key)")
            self._db.execute("delete from held")
            self._db.executemany("insert into held values (?)", ((int(k),) for k in keys))
            self._db.execute("update rows set vector = null where key in (select key from held)")
            self._db.execute("insert or replace into state values (1, ?)", (generation,))

    def fetch(self, keys: Iterable[int]) -> dict[int, Payload]:
        """By key; rows deleted meanwhile are not there."""
        wanted = list(keys)
        found: dict[int, Payload] = {}
        with self._read() as db:
            for start in range(0, len(wanted), 500):
                part = wanted[start : start + 500]
                marks = ",".join("?" * len(part))
                for key, name, text, metadata in db.execute(
                    f"select key, id, text, metadata from rows where key in ({marks})", part
                ):
                    parsed = None if metadata is None else json.loads(metadata)
                    found[key] = Payload(name, text, parsed)
        return found

    def matching(self, wanted: Filter) -> NDArray[np.int64]:
        """Keys of the rows that a filter lets through."""
        condition, values = wanted.sql()
        with self._read() as db:
            found = db.execute(f"select key from rows where {condition}", values).fetchall()
        return np.array(found, np.int64).reshape(-1)

    def _delete(self, ids: Sequence[str]) -> list[int]:
        return [
            key
            for one in ids
            for (key,) in self._db.execute("delete from rows where id = ? returning key", (one,))
        ]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        try:
            db: sqlite3.Connection | None = getattr(self._own, "db", None)
            if db is None:
                db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
                db.execute("pragma query_only=on")
                self._own.db = db
                with self._lock:
                    self._readers.append(db)
            yield db
        except sqlite3.Error as error:
            raise IndexFileError(f"{self._path}: {error}") from error

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise IndexFileError(f"{self._path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._wrapped():
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it itself when the disk is full
                    self._db.execute("rollback")
                raise
            self._db.execute("commit")


def _columns(one: Payload) -> tuple[str, str | None, str | None]:
    if one.metadata is None:
        return one.id, one.text, None
    plain = _plain(one.metadata)
    return one.id, one.text, json.dumps(plain, allow_nan=False)


def _plain(value: Any) -> Any:
    """As JSON has it: what is no number is nothing, times are ISO 8601, all else is text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.isoformat() if isinstance(value, date | time) else str(value)
