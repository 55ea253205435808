"""The index file: whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppd.ann import batch
from ppd.ann.snapshot import Precision
from ppd.ann.space import Metric
from router.pool import index_file

from .ann_fixtures import clustered, made, target_of

ROOT = Path(__file__).parents[2]
ROWS = clustered(900, 40, 20, 0)

_ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from ppd.errors import IndexFileError
from router.pool import index_file
path = Path(sys.argv[1])
snapshot = index_file.read(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    index_file.write(snapshot, path)
except IndexFileError as error:
    print(error)
"""


@pytest.mark.parametrize("precision", list(Precision))
def test_what_is_read_is_what_was_written(tmp_path: Path, precision: Precision) -> None:
    written = made(ROWS, Metric.COSINE, precision)
    path = tmp_path / "one.ann"
    index_file.write(written, path)
    read = index_file.read(path)
    assert read.space.metric is Metric.COSINE
    assert read.precision is precision
    for snapshot_near, read_near in zip(
        batch.search(target_of(written), ROWS[:50], 10, 32),
        batch.search(target_of(read), ROWS[:50], 10, 32),
        strict=True,
    ):
        assert np.array_equal(snapshot_near, read_near)
    assert not read.graph.codes.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["one.ann"]


def test_a_disk_that_is_full_costs_nothing_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "one.ann"
    index_file.write(made(ROWS), path)
    before = path.read_bytes()
    told = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "cannot be written: [Errno 27] File too large" in told.stdout
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["one.ann"]
