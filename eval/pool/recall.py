"""Searches a second at a wanted recall, between the widths that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

RECALL = 0.95  # that indexes are compared at


def qps_at(curve: Sequence[tuple[float, float]], wanted: float = RECALL) -> float | None:
    """Return the searches a second at a recall.

    The logarithm of the rate is linear between two points.

    Args:
        curve: recall and searches a second of each width, in the order of the widths.

    Returns:
        The rate, or None if no width reaches the recall.
    """
    for (low, fast), (high, slow) in pairwise(curve):
        if low <= wanted <= high and high > low:
            share = (wanted - low) / (high - low)
            return round(float(fast ** (1 - share) * slow**share), 1)
    reached = [qps for recall, qps in curve if recall >= wanted]
    return round(max(reached), 1) if reached else None
