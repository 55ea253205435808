"""The payloads of a collection's rows, in SQLite: the user's id, text and metadata.

A row's key is never reused. So a key of the index file that is missing here is of a row deleted
since the file was written. Rows added since have their vector here. Together the two files hold
exactly what has been committed here, also after a restart.

Each thread reads through its own connection and sees the latest commit. No read waits for a
transaction or for another thread's scan.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The data of a row beside its vector.

    Attributes:
        id: given by the user, unique in the collection.
        text: of the row.
        metadata: that filters use; JSON.
    """

    id: str
    text: str | None = None
    metadata: dict[str, Any] | None = None


class Payloads:
    """The payloads of one collection. Every method may raise an IndexFileError.

    Args:
        path: of the SQLite file, which is created if it does not exist.

    Raises:
        IndexFileError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._wrapped():
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute(
                "pragma synchronous=full"
            )  # an acknowledged write survives a power cut
            self._db.executescript(_SCHEMA)
            last = self._db.execute("select seq from sqlite_sequence").fetchone()
        self._last_key = 0 if last is None else int(last[0])
        self._own = threading.local()
        self._readers: list[sqlite3.Connection] = []

    def close(self) -> None:
        """Close all connections. No thread may read any more."""
        with self._lock:
            for connection in (*self._readers, self._db):
                connection.close()

    def new_keys(self, count: int) -> NDArray[np.int64]:
        """Return ``count`` ascending keys that have never been used."""
        with self._lock:
            first = self._last_key + 1
            self._last_key += count
        return np.arange(first, first + count, dtype=np.int64)

    def index(self, name: str) -> None:
        """Create an index for filters on a field of the metadata.

        Raises:
            RequestError: the field's name is invalid.
        """
        with self._wrapped():
            self._db.execute(f'create index if not exists "by {name}" on rows ({field_sql(name)})')

    def generation(self) -> int:
        """Return the number of the index file that belongs to the rows; 0: there is none yet."""
        with self._wrapped():
            found = self._db.execute("select generation from state").fetchone()
        return 0 if found is None else int(found[0])

    def keys(self) -> NDArray[np.int64]:
        """Return the keys of all rows, ascending."""
        with self._wrapped():
            found = self._db.execute("select key from rows order by key").fetchall()
        return np.array(found, np.int64).reshape(-1)

    def added(self) -> tuple[NDArray[np.int64], Rows | None]:
        """Return keys and vectors, as given, of the rows that the index file does not have."""
        with self._wrapped():
            found = self._db.execute(
                "select key, vector from rows where vector is not null order by key"
            ).fetchall()
        if not found:
            return np.empty(0, np.int64), None
        vectors = np.stack([np.frombuffer(vector, np.float32) for _, vector in found])
        return np.array([key for key, _ in found], np.int64), vectors

    def insert(self, payloads: Iterable[Payload]) -> NDArray[np.int64]:
        """Insert the rows of a new index, and return their keys in order.

        Raises:
            IndexFileError: an id is not unique.
        """
        with self._transaction():
            keys = [
                self._db.execute(
                    "insert into rows (id, text, metadata) values (?, ?, ?)", _columns(payload)
                ).lastrowid
                for payload in payloads
            ]
        return np.array(keys, np.int64)

    def upsert(
        self, keys: NDArray[np.int64], payloads: Sequence[Payload], vectors: Rows
    ) -> list[int]:
        """Insert rows, and return the keys of the rows with the same ids that they replace.

        Args:
            keys: from ``new_keys``.
            payloads: of the rows.
            vectors: of the rows, as given by the user.
        """
        rows = [
            (key, *_columns(payload), vector.astype(np.float32).tobytes())
            for key, payload, vector in zip(keys.tolist(), payloads, vectors, strict=True)
        ]
        with self._transaction():
            old = self._delete([payload.id for payload in payloads])
            self._db.executemany(
                "insert into rows (key, id, text, metadata, vector) values (?, ?, ?, ?, ?)", rows
            )
        return old

    def delete(self, ids: Sequence[str]) -> list[int]:
        """Delete rows by id, and return the keys of those that existed."""
        with self._transaction():
            return self._delete(ids)

    def delete_matching(self, row_filter: Filter) -> list[int]:
        """Delete the rows that pass a filter, and return their keys."""
        condition, values = row_filter.sql()
        with self._transaction():
            deleted = self._db.execute(f"delete from rows where {condition} returning key", values)
            return [key for (key,) in deleted.fetchall()]

    def adopt(self, generation: int, keys: NDArray[np.int64]) -> None:
        """Record that an index file now belongs to the rows.

        Args:
            generation: number of the file.
            keys: of the rows that it has.
        """
        with self._transaction():
            self._db.execute("create temp table if not exists held (key integer primary key)")
            self._db.execute("delete from held")
            self._db.executemany("insert into held values (?)", ((int(k),) for k in keys))
            self._db.execute("update rows set vector = null where key in (select key from held)")
            self._db.execute("insert or replace into state values (1, ?)", (generation,))

    def replace_by(
        self, path: Path, offset: int, generation: int, committing: Callable[[], None]
    ) -> None:
        """Replace all rows by those of another collection's file, in one transaction.

        Args:
            path: of the other file. Its indexes for filters are created here, too.
            offset: is added to its keys, which are new here then.
            generation: number of the index file that has these rows.
            committing: is called just before the new rows can be read.
        """
        with self._wrapped():
            self._db.execute("attach database ? as other", (str(path),))
        try:
            with self._transaction():
                self._db.execute("delete from main.rows")
                self._db.execute(
                    "insert into main.rows (key, id, text, metadata) "
                    "select key + ?, id, text, metadata from other.rows order by key",
                    (offset,),
                )
                indexes = self._db.execute(
                    "select name, sql from other.sqlite_master where name like 'by %'"
                ).fetchall()
                for name, sql in indexes:
                    if not self._db.execute(
                        "select 1 from main.sqlite_master where name = ?", (name,)
                    ).fetchone():
                        self._db.execute(sql)  # unqualified names are those of this file
                self._db.execute("insert or replace into main.state values (1, ?)", (generation,))
                committing()
        finally:
            with self._wrapped():
                self._db.execute("detach database other")

    def fetch(self, keys: Iterable[int]) -> dict[int, Payload]:
        """Return payloads by key, without those of deleted rows."""
        all_keys = list(keys)
        found: dict[int, Payload] = {}
        with self._read() as db:
            for start in range(0, len(all_keys), 500):
                part = all_keys[start : start + 500]
                marks = ",".join("?" * len(part))
                for key, name, text, metadata in db.execute(
                    f"select key, id, text, metadata from rows where key in ({marks})", part
                ):
                    parsed = None if metadata is None else json.loads(metadata)
                    found[key] = Payload(name, text, parsed)
        return found

    def matching(self, row_filter: Filter) -> NDArray[np.int64]:
        """Return the keys of the rows that pass a filter."""
        condition, values = row_filter.sql()
        with self._read() as db:
            found = db.execute(f"select key from rows where {condition}", values).fetchall()
        return np.array(found, np.int64).reshape(-1)

    def _delete(self, ids: Sequence[str]) -> list[int]:
        return [
            key
            for row_id in ids
            for (key,) in self._db.execute("delete from rows where id = ? returning key", (row_id,))
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


def _columns(payload: Payload) -> tuple[str, str | None, str | None]:
    if payload.metadata is None:
        return payload.id, payload.text, None
    plain = _plain(payload.metadata)
    return payload.id, payload.text, json.dumps(plain, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return a value that JSON has: None for NaN and infinity, ISO 8601 for times, else text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.isoformat() if isinstance(value, date | time) else str(value)
