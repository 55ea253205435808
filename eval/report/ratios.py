"""Ratios of two sides that were measured in the same rounds, and when they are a tie."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..routers.summary import geometric_interval
from .results import Rows

HOW = "median [95 % interval of the mean]; a tie where the interval holds 1"


def compared(ratios: Sequence[float]) -> str:
    """Format ratios: the median, the 95 % interval of the geometric mean, and whether it holds 1.

    None are a dash. Of one ratio there is no interval.
    """
    if not ratios:
        return "-"
    middle = f"{statistics.median(ratios):.2f}"
    interval = geometric_interval(ratios)
    if interval is None:
        return middle
    low, high = interval
    tie = ", tie" if low <= 1 <= high else ""
    return f"{middle} [{low:.2f}, {high:.2f}]{tie}"


def paired(one: Rows, other: Rows, metric: str, *fields: str) -> list[float]:
    """Divide one side's values by the other's.

    Args:
        fields: what two rows of a pair have in common, and no other row of their side.
    """
    base = {tuple(row.get(field) for field in fields): row[metric] for row in other}
    keys = (tuple(row.get(field) for field in fields) for row in one)
    return [row[metric] / base[key] for key, row in zip(keys, one.rows, strict=True) if key in base]
