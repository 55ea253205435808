"""Creation of collections, from a file of vectors or empty.

A collection's folder gets its name only when it is complete.
"""

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
    """Options of building a collection from a file.

    Attributes:
        metric: of the vectors' distance.
        precision: of the vectors' codes in the graph.
        shape: of the graph.
        threads: of the build.
        seed: of the build's random numbers.
        column: of a parquet file that holds the vectors.
        finder: of each row's nearest neighbours.
        indexed: fields of the metadata that get an index for filters.
    """

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
    """Build a collection from a file of vectors.

    Args:
        source_path: of the file.
        folder: of the collection; its last part is the name.
        options: of the build.
        progress: is called with the stage and the rows done.

    Raises:
        ConfigError: the folder exists, or the finder of neighbours is not installed.
        IndexFileError: vectors cannot be read, or the collection cannot be written. No part of
            it is left then.
    """
    _require_free(folder)
    source = open_source(source_path, options.column)
    with _complete_or_absent(folder) as part:
        _build(source, part, options, progress)


def create_collection(folder: Path, space: Space, indexed: Sequence[str]) -> None:
    """Create a collection without rows.

    Args:
        folder: of the collection; its last part is the name.
        space: of its vectors.
        indexed: fields of the metadata that get an index for filters.

    Raises:
        ConfigError: the folder exists.
        IndexFileError: the collection cannot be written. No part of it is left then.
        RequestError: a field has an invalid name.
    """
    _require_free(folder)
    with _complete_or_absent(folder) as part, closing(Payloads(part / ROWS_FILE)) as payloads:
        for name in indexed:
            payloads.index(name)
        index_file.write(Snapshot.empty(space, Shape().degree), index_path(part, 1))
        payloads.adopt(1, np.empty(0, np.int64))


def _require_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder}: it is there already; give another name or remove it")


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, and rename it to ``folder`` at the end."""
    part = folder.with_name(f".{folder.name}.part")
    try:
        if part.exists():
            shutil.rmtree(part)  # left by a killed build
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except OSError as error:
        raise IndexFileError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)  # exists only after a failure


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
    for piece, columns in source.pieces():
        rows[at : at + piece.shape[0]] = piece
        for i in range(piece.shape[0]):
            yield _payload(at + i, columns[i] if columns else {})
        at += piece.shape[0]
        progress("reading", at, source.count)
    if at != source.count:
        raise IndexFileError(f"{source.path}: {at} vectors, {source.count} were promised")


def _payload(number: int, columns: dict[str, Any]) -> Payload:
    """Return a row's payload: the columns ``id`` and ``text``, and all others as metadata."""
    metadata = dict(columns)
    name = str(metadata.pop("id", number))
    text = metadata.pop("text", None)
    return Payload(name, None if text is None else str(text), metadata or None)
