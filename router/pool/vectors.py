"""Reading of vectors from .npy, .fbin, .parquet and .hdf5 files, in pieces."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppd.ann.space import Rows
from ppd.errors import IndexFileError

_PIECE = 16384  # rows


@dataclass(frozen=True, slots=True)
class Source:
    """A file of vectors.

    Attributes:
        path: of the file.
        count, dimensions: of its vectors.
        columns: of a table: the column of vectors, then all others.
    """

    path: Path
    count: int
    dimensions: int
    columns: tuple[str, ...] = ()

    def pieces(self) -> Iterator[tuple[Rows, Sequence[dict[str, Any]]]]:
        """Yield vectors, (rows, dimensions) float32, and the other columns of each row.

        A piece has some thousand rows.

        Raises:
            IndexFileError: a vector is not finite.
        """
        at = 0
        for rows, columns in _READERS[self.path.suffix](self):
            wrong = np.flatnonzero(~np.isfinite(rows).all(1))
            if wrong.size:
                raise IndexFileError(f"{self.path}: vector {at + int(wrong[0])} is not finite")
            at += rows.shape[0]
            yield np.ascontiguousarray(rows, np.float32), columns


def open_source(path: Path, column: str = "vector") -> Source:
    """Open a file of vectors.

    Args:
        path: of the file; its suffix names the format. An HDF5 file needs a data set ``train``,
            as ann-benchmarks' files have.
        column: of a parquet file that holds the vectors.

    Raises:
        IndexFileError: the file cannot be read, or holds no vectors.
    """
    try:
        match path.suffix:
            case ".npy":
                array = np.load(path, mmap_mode="r")
                source = _shaped(path, array.shape, array.dtype)
            case ".fbin":
                source = _fbin(path)
            case ".parquet":
                source = _parquet(path, column)
            case ".hdf5" | ".h5":
                source = _hdf5(path)
            case _:
                known = ", ".join(_READERS)
                raise IndexFileError(f"{path}: vectors are read from {known} files")
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise IndexFileError(f"{path}: cannot be read: {error}") from error
    if source.count == 0 or source.dimensions == 0:
        raise IndexFileError(f"{path}: there is no vector in it")
    return source


def _shaped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Source:
    if len(shape) != 2 or dtype.kind not in "fiu":
        raise IndexFileError(f"{path}: rows of numbers are needed, not {dtype} of shape {shape}")
    return Source(path, int(shape[0]), int(shape[1]))


def _fbin(path: Path) -> Source:
    """Open a file of big-ann-benchmarks: int32 rows, int32 columns, float32; little-endian."""
    with path.open("rb") as file:
        count, dimensions = struct.unpack("<ii", file.read(8))
    expected = 8 + 4 * count * dimensions
    if min(count, dimensions) < 0 or path.stat().st_size != expected:
        raise IndexFileError(
            f"{path}: {path.stat().st_size} bytes; {count} x {dimensions} vectors take {expected}"
        )
    return Source(path, count, dimensions)


def _parquet(path: Path, column: str) -> Source:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    if column not in names:
        raise IndexFileError(f"{path}: no column {column!r}, only {', '.join(names)}")
    first = next(file.iter_batches(1, columns=[column]), None)
    dimensions = 0 if first is None or not first.num_rows else len(first.column(0)[0])
    others = tuple(name for name in names if name != column)
    return Source(path, file.metadata.num_rows, dimensions, (column, *others))


def _hdf5(path: Path) -> Source:
    import h5py

    with h5py.File(path) as file:
        if "train" not in file:
            raise IndexFileError(f"{path}: no data set 'train', only {', '.join(file)}")
        return _shaped(path, file["train"].shape, file["train"].dtype)


def _read_npy(source: Source) -> Iterator[tuple[Rows, Sequence[dict[str, Any]]]]:
    array = np.load(source.path, mmap_mode="r")
    for start in range(0, source.count, _PIECE):
        yield np.asarray(array[start : start + _PIECE], np.float32), ()


def _read_fbin(source: Source) -> Iterator[tuple[Rows, Sequence[dict[str, Any]]]]:
    shape = source.count, source.dimensions
    array = np.memmap(source.path, "<f4", "r", offset=8, shape=shape)
    for start in range(0, source.count, _PIECE):
        yield np.asarray(array[start : start + _PIECE], np.float32), ()


def _read_parquet(source: Source) -> Iterator[tuple[Rows, Sequence[dict[str, Any]]]]:
    from pyarrow import parquet

    column, *others = source.columns
    for batch in parquet.ParquetFile(source.path).iter_batches(_PIECE):
        vectors = batch.column(column)
        lengths = {len(vector) for vector in vectors if vector.is_valid}
        if vectors.null_count or lengths - {source.dimensions}:
            raise IndexFileError(
                f"{source.path}: {column!r} needs {source.dimensions} numbers in every row"
            )
        flat = vectors.flatten().to_numpy(zero_copy_only=False)
        rows = np.asarray(flat, np.float32).reshape(-1, source.dimensions)
        yield rows, batch.select(others).to_pylist() if others else ()


def _read_hdf5(source: Source) -> Iterator[tuple[Rows, Sequence[dict[str, Any]]]]:
    import h5py

    with h5py.File(source.path) as file:
        for start in range(0, source.count, _PIECE):
            yield np.asarray(file["train"][start : start + _PIECE], np.float32), ()


_READERS = {
    ".npy": _read_npy,
    ".fbin": _read_fbin,
    ".parquet": _read_parquet,
    ".hdf5": _read_hdf5,
    ".h5": _read_hdf5,
}
