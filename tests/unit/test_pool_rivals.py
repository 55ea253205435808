"""The indexes that the pool is compared with: all of them find what is near."""

from __future__ import annotations

from pathlib import Path

import faiss
import h5py
import numpy as np
import pytest

from eval.pool import hdf5, rivals_int8
from eval.pool.given import Given
from eval.pool.rivals_int8 import Find, measured_again
from ppd.errors import ConfigError

from .ann_fixtures import clustered

LIMIT = 10
ROWS = clustered(1200, 32, 20, 0)
QUERIES = ROWS[:40] + np.float32(0.05)


def recall(find: Find, width: int) -> float:
    _, truth = faiss.knn(QUERIES, ROWS, LIMIT)
    found = find(QUERIES, width, 1)
    assert found.shape == (40, LIMIT)
    pairs = zip(found.tolist(), truth.tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / float(truth.size)


@pytest.mark.parametrize("kind", ["faiss_hnsw_sq", "usearch_i8", "svs_i8"])
def test_codes_of_a_byte_find_what_is_near(kind: str) -> None:
    pytest.importorskip({"usearch_i8": "usearch", "svs_i8": "svs"}.get(kind, "faiss"))
    find = getattr(rivals_int8, kind)(16, 100, LIMIT)(Given(ROWS, 1))
    assert recall(find, 64) > 0.95
    assert recall(find, 64) >= recall(find, 10)


def test_candidates_are_ordered_by_the_rows_themselves() -> None:
    candidates = np.tile(np.arange(100), (40, 1))
    found = measured_again(ROWS, QUERIES, candidates, 3)
    distances = ((QUERIES[:, None] - ROWS[None, :100]) ** 2).sum(2)
    assert found.tolist() == np.argsort(distances, axis=1)[:, :3].tolist()


def test_a_published_set_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made-12-angular.hdf5"
    rows = np.arange(1, 25, dtype=np.float32).reshape(12, 2)
    with h5py.File(path, "w") as file:
        file.attrs["distance"] = "angular"
        file["train"], file["test"] = rows, rows[:2]
        file["neighbors"] = np.arange(24).reshape(2, 12)
    of = hdf5.read(path, LIMIT)
    assert (of.name, of.truth.shape) == ("made-12-angular", (2, LIMIT))
    assert np.linalg.norm(of.rows, axis=1) == pytest.approx(1.0)
    assert of.queries == pytest.approx(of.rows[:2])
    with pytest.raises(ConfigError, match="must be 2 x 13 at least"):
        hdf5.read(path, 13)


@pytest.mark.parametrize(
    ("distance", "sets", "message"),
    [
        ("hamming", ("train", "test", "neighbors"), "'hamming', not one of euclidean, angular"),
        ("euclidean", ("train", "test"), "no data set neighbors"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, distance: str, sets: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "wrong.hdf5"
    with h5py.File(path, "w") as file:
        file.attrs["distance"] = distance
        for name in sets:
            file[name] = np.zeros((3, 3), np.float32)
    with pytest.raises(ConfigError, match=message):
        hdf5.read(path, 1)
    path.write_text("no HDF5")
    with pytest.raises(ConfigError, match=r"wrong\.hdf5"):
        hdf5.read(path, 1)
