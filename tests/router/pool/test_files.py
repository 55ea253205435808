"""What collections are read from and written to."""

from __future__ import annotations

import struct
from datetime import datetime, timedelta
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ppd.ann.graph import no_progress
from ppd.errors import ConfigError, IndexFileError
from router.pool.build import build_collection
from router.pool.collection import Collection, index_path

from .pools import OPTIONS, ROWS, WIDTH, config_for, running


@pytest.mark.parametrize("kind", ["npy", "fbin", "hdf5"])
def test_vectors_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "npy":
            np.save(path, ROWS[:300])
        case "fbin":
            path.write_bytes(struct.pack("<ii", 300, WIDTH) + ROWS[:300].tobytes())
        case _:
            with h5py.File(path, "w") as file:
                file["train"] = ROWS[:300]
    build_collection(path, tmp_path / "made", OPTIONS, no_progress)
    made = Collection(tmp_path / "made", lambda target: None)
    assert made.count == 300
    payload = made.payloads_of(made.target, np.array([7], np.int32))[0]
    assert payload is not None
    assert payload.id == "7"
    made.payloads.close()


def test_wrong_files_leave_nothing_behind(tmp_path: Path) -> None:
    broken = ROWS[:50].copy()
    broken[7, 3] = np.nan
    np.save(tmp_path / "nan.npy", broken)
    np.save(tmp_path / "empty.npy", ROWS[:0])
    np.save(tmp_path / "flat.npy", ROWS[0])
    (tmp_path / "cut.fbin").write_bytes(struct.pack("<ii", 300, WIDTH) + b"1234")
    (tmp_path / "odd.xyz").write_bytes(b"")
    for name, says in (
        ("nan.npy", "vector 7 is not finite"),
        ("empty.npy", "no vector"),
        ("flat.npy", "rows of numbers"),
        ("cut.fbin", "12 bytes; 300 x 24 vectors take 28808"),
        ("odd.xyz", "are read from"),
        ("absent.npy", "cannot be read"),
    ):
        with pytest.raises(IndexFileError, match=says):
            build_collection(tmp_path / name, tmp_path / "made", OPTIONS, no_progress)
        assert not [path for path in tmp_path.iterdir() if "made" in path.name]
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match="there already"):
        build_collection(tmp_path / "nan.npy", tmp_path / "made", OPTIONS, no_progress)


def test_a_damaged_truncated_or_foreign_index_is_refused(data: Path) -> None:
    path = index_path(data / "docs", 1)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    later = bytearray(whole)
    later[8] = 9
    for content, says in (
        (whole[: len(whole) // 2], "truncated"),
        (whole[:10], "not an index"),
        (b"", "cannot be opened"),
        (b"\x93NUMPY" + whole[6:], "not an index"),
        (bytes(flipped), "is damaged"),
        (bytes(later), "format 9"),
        (whole[:100] + b"x" + whole[101:], "header is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(IndexFileError, match=says):
            Collection(data / "docs", lambda target: None)
    path.write_bytes(whole)
    Collection(data / "docs", lambda target: None).payloads.close()


async def test_metadata_of_all_kinds_can_be_filtered_by(tmp_path: Path) -> None:
    """What JSON has no word for: no numbers, times, bytes."""
    day = datetime(2026, 3, 1, 12, 30)
    table = pa.table(
        {
            "vector": list(ROWS[:40]),
            "weight": [float("nan") if i % 2 else i / 2 for i in range(40)],
            "at": [day + timedelta(days=i) for i in range(40)],
            "raw": [b"x"] * 40,
        }
    )
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "kinds.parquet")
    build_collection(tmp_path / "kinds.parquet", tmp_path / "data" / "docs", OPTIONS, no_progress)
    async with running(config_for(tmp_path / "data")) as pool:
        light = await pool.ids(ROWS[0], filter={"weight": {"lt": 3}})
        assert sorted(light) == ["0", "2", "4"]
        early = await pool.ids(ROWS[0], filter={"at": {"lt": "2026-03-04"}})
        assert sorted(early) == ["0", "1", "2"]
