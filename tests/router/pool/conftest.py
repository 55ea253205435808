"""Fixtures of the pool's tests."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from ppd.ann.graph import no_progress
from router.pool.build import build_collection

from .pools import COUNT, OPTIONS, ROWS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file with ids, texts and metadata, as a collection ``docs``."""
    folder = tmp_path_factory.mktemp("built")
    table = pa.table(
        {
            "id": [f"d{i}" for i in range(COUNT)],
            "vector": list(ROWS),
            "text": [f"text {i}" for i in range(COUNT)],
            "year": [2000 + i % 25 for i in range(COUNT)],
            "lang": ["en" if i % 100 else "fr" for i in range(COUNT)],
        }
    )
    parquet.write_table(table, folder / "docs.parquet")
    build_collection(folder / "docs.parquet", folder / "docs", OPTIONS, no_progress)
    return folder


@pytest.fixture
def data(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may write to."""
    folder = tmp_path / "data" / "docs"
    folder.mkdir(parents=True)
    for path in (built / "docs").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder.parent
