"""Collections are made here, out of a file of vectors or empty, in folders that appear whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppd.ann.graph import Progress
from ppd.ann.neighbours import Finder
from ppd.ann.snapshot import Precision, Shape, Snapshot, build
from ppd.ann.space import Metric, Rows, Space
from ppd.errors import ConfigError, IndexFileError

from . import index_file
from .collection import ROWS_FILE, index_path
from .payloads import Payload, Payloads
from .vectors import Source, open_source


@dataclass(frozen=True, slots=True)
class BuildOptions:
    metric: Metric
    precision: Precision
    shape: Shape
    threads: int
    seed: int = 0
    column: str = "vector"
    finder: Finder = Finder.AUTO
    indexed: tuple[str, ...] = ()


def build_collection(
    source_path: Path, folder: Path, options: BuildOptions, progress: Progress
) -> None:
    """
    Raises:
        ConfigError: there is such a collection already, or no such finder of neighbours.
        IndexFileError: vectors cannot be read, or the collection cannot be written; nothing of it
            is left then.
    """
    _require_free(folder)
    source = open_source(source_path, options.column)
    with _appearing(folder) as part:
        _build(source, part, options, progress)


def create_collection(folder: Path, space: Space, indexed: Sequence[str]) -> None:
    """Without rows.

    Args:
        indexed: fields of metadata that filters shall find without looking at every row.

    Raises:
        ConfigError: there is such a collection already.
        IndexFileError: it cannot be written; nothing of it is left then.
        RequestError: there cannot be a field of that name.
    """
    _require_free(folder)
    with _appearing(folder) as part, closing(Payloads(part / ROWS_FILE)) as payloads:
        for name in indexed:
            payloads.index(name)
        index_file.write(Snapshot.empty(space, Shape().degree), index_path(part, 1))
        payloads.adopt(1, np.empty(0, np.int64))


def _require_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder}: it is there already; give another name or remove it")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is there."""
    part = folder.with_name(f".{folder.name}.part")
    try:
        if part.exists():
            shutil.rmtree(part)  # of a build that was killed
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except OSError as error:
        raise IndexFileError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone, unless something failed


def _build(source: Source, folder: Path, options: BuildOptions, progress: Progress) -> None:
    rows = np.empty((source.count, source.dimensions), np.float32)
    with closing(Payloads(folder / ROWS_FILE)) as payloads:
        for name in options.indexed:
            payloads.index(name)
        keys = payloads.insert(_read(source, rows, progress))
        snapshot = build(
            rows,
            keys,
            options.metric,
            options.precision,
            options.shape,
            threads=options.threads,
            seed=options.seed,
            finder=options.finder,
            progress=progress,
        )
        progress("writing", 0, 0)
        index_file.write(snapshot, index_path(folder, 1))
        payloads.adopt(1, keys)


def _read(source: Source, rows: Rows, progress: Progress) -> Iterator[Payload]:
    at = 0
    for piece, beside in source.pieces():
        rows[at : at + piece.shape[0]] = piece
        for i in range(piece.shape[0]):
            yield _payload(at + i, beside[i] if beside else {})
        at += piece.shape[0]
        progress("reading", at, source.count)
    if at != source.count:
        raise IndexFileError(f"{source.path}: {at} vectors, {source.count} were promised")


def _payload(number: int, beside: dict[str, Any]) -> Payload:
    """``id`` and ``text`` are columns of that name; all others are metadata."""
    given = dict(beside)
    name = str(given.pop("id", number))
    text = given.pop("text", None)
    return Payload(name, None if text is None else str(text), given or None)
