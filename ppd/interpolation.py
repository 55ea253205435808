"""The place of a value between the points of an axis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def between(points: Sequence[float], value: float) -> tuple[int, float]:
    """The index of the point below ``value``, and the fraction of the way to the next point."""
    above = bisect_right(points, value)
    if above == 0:
        return 0, 0.0
    if above == len(points):
        return above - 1, 0.0
    low, high = points[above - 1], points[above]
    return above - 1, (value - low) / (high - low)
