"""The rows that are drawn where they are searched."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from eval.pool.card_rows import clustered  # noqa: E402


def test_rows_lie_in_clusters_and_are_the_same_for_a_seed() -> None:
    cpu = torch.device("cpu")
    rows = clustered(3000, 64, 1, cpu)
    assert rows.shape == (3000, 64)
    assert torch.equal(rows, clustered(3000, 64, 1, cpu))
    assert not torch.equal(rows, clustered(3000, 64, 2, cpu))
    distances = torch.cdist(rows[:300], rows)
    distances[:, :300].fill_diagonal_(float("inf"))
    # Without clusters the nearest of 3,000 rows is nearly as far as the median one.
    assert (distances.min(1).values / distances.median(1).values).median() < 0.8
