"""The file format of an index: a header, then its arrays, each at a page boundary.

A file is written under a temporary name and renamed when it is complete. So a reader finds the old
file or the new one. Arrays are memory-mapped; their checksums are verified when the file is
opened.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ppd.ann.kernels import Graph
from ppd.ann.snapshot import Precision, Snapshot
from ppd.ann.space import Metric, Space
from ppd.errors import IndexFileError

MAGIC = b"PPDANN\r\n"  # detects a transfer that changes line ends
VERSION = 1
_PAGE = 4096
_FIXED = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, its xxh3-64
_DTYPES = {"float32", "uint16", "int8", "int32", "int64"}


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    xxh3: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of an index file.

    Attributes:
        file_bytes: size of the whole file.
    """

    metric: Metric
    precision: Precision
    dimensions: int
    length: float
    scale: float
    file_bytes: int
    arrays: dict[str, _Array]


def _arrays(snapshot: Snapshot) -> dict[str, NDArray[Any]]:
    space, graph = snapshot.space, snapshot.graph
    return {
        "mean": space.mean,
        "axes": space.axes,
        "reach": graph.reach,
        "seed_ids": graph.seed_ids,
        "seed_rows": graph.seed_rows,
        "keys": snapshot.keys,
        "neighbours": graph.neighbours,
        "codes": graph.codes,
        "exact": snapshot.exact,
    }


def write(snapshot: Snapshot, path: Path) -> None:
    """Write an index file, replacing one of the same name.

    Raises:
        IndexFileError: the file cannot be written; the old one is unchanged.
    """
    arrays = _arrays(snapshot)
    header = _layout(snapshot, arrays)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(header)
            for array in arrays.values():
                file.write(b"\0" * (-file.tell() % _PAGE))
                file.write(_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the new name durable, too
        finally:
            os.close(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise IndexFileError(f"{path}: cannot be written: {error}") from error


def read(path: Path) -> Snapshot:
    """Open an index file; its arrays are memory-mapped.

    Raises:
        IndexFileError: the file is no index, or is of another version, truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise IndexFileError(f"{path}: cannot be opened: {error}") from error
    header = _header(path, mapped)
    arrays = dict(_views(path, mapped, header))
    snapshot = Snapshot(
        space=Space(
            header.metric, header.dimensions, header.length, arrays["mean"], arrays["axes"]
        ),
        precision=header.precision,
        scale=header.scale,
        graph=Graph(
            codes=arrays["codes"],
            neighbours=arrays["neighbours"],
            seed_ids=arrays["seed_ids"],
            seed_rows=arrays["seed_rows"],
            reach=arrays["reach"],
        ),
        exact=arrays["exact"],
        keys=arrays["keys"],
    )
    _check_ids(path, snapshot)
    return snapshot


def _layout(snapshot: Snapshot, arrays: dict[str, NDArray[Any]]) -> bytes:
    """Return the encoded header. The arrays begin on the next page, whatever its size is."""
    offset = _PAGE
    places = {}
    for name, array in arrays.items():
        offset += -offset % _PAGE
        data = np.ascontiguousarray(array)
        digest = xxhash.xxh3_64_intdigest(_bytes(data))
        places[name] = _Array(data.dtype.name, data.shape, offset, digest)
        offset += data.nbytes
    header = msgspec.json.encode(
        _Header(
            metric=snapshot.space.metric,
            precision=snapshot.precision,
            dimensions=snapshot.space.dimensions,
            length=snapshot.space.length,
            scale=snapshot.scale,
            file_bytes=offset,
            arrays=places,
        )
    )
    fixed = _FIXED.pack(MAGIC, VERSION, len(header), xxhash.xxh3_64_intdigest(header))
    assert len(fixed) + len(header) <= _PAGE, "the header fits its page"
    return fixed + header


def _header(path: Path, mapped: mmap.mmap) -> _Header:
    if len(mapped) < _FIXED.size or mapped[: len(MAGIC)] != MAGIC:
        raise IndexFileError(f"{path}: not an index of this pool")
    _, version, length, digest = _FIXED.unpack_from(mapped)
    if version != VERSION:
        raise IndexFileError(f"{path}: format {version}; this version reads {VERSION}")
    data = mapped[_FIXED.size : _FIXED.size + length]
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise IndexFileError(f"{path}: its header is damaged")
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.MsgspecError as error:
        raise IndexFileError(f"{path}: its header makes no sense: {error}") from error
    if len(mapped) != header.file_bytes:
        raise IndexFileError(
            f"{path}: {len(mapped)} bytes long, its header has {header.file_bytes}: truncated?"
        )
    return header


def _views(path: Path, mapped: mmap.mmap, header: _Header) -> Iterator[tuple[str, NDArray[Any]]]:
    for name in (
        "mean",
        "axes",
        "reach",
        "seed_ids",
        "seed_rows",
        "keys",
        "neighbours",
        "codes",
        "exact",
    ):
        described = header.arrays.get(name)
        if described is None or described.dtype not in _DTYPES:
            raise IndexFileError(f"{path}: no array {name!r} that can be read")
        view = np.ndarray(described.shape, described.dtype, mapped, described.offset)
        if xxhash.xxh3_64_intdigest(_bytes(view)) != described.xxh3:
            raise IndexFileError(f"{path}: its array {name!r} is damaged")
        yield name, view


def _check_ids(path: Path, snapshot: Snapshot) -> None:
    """Check that all ids are in range: compiled code uses them without a check."""
    n = snapshot.count
    graph = snapshot.graph
    for name, ids, lowest in (
        ("neighbours", graph.neighbours, -1),
        ("seed_ids", graph.seed_ids, 0),
    ):
        if ids.size and not (ids.min() >= lowest and ids.max() < n):
            raise IndexFileError(f"{path}: {name} lead outside of its {n} rows")
    shapes = graph.codes.shape[0], graph.neighbours.shape[0]
    if shapes != (n, n) or graph.codes.shape[1] != snapshot.space.width:
        raise IndexFileError(f"{path}: its arrays do not belong together")


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
