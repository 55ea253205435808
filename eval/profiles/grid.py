"""Interpolation in a grid of one or two axes, with a bound on what lies outside.

Between two points a value is linear in both axes. Beyond the last point of an axis the last two
points are continued in a line, up to twice that point. Anything further is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.errors import ConfigError


class OutsideProfileError(ConfigError):
    """A shape lies beyond twice the range of a profile."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a grid.

    Attributes:
        name: what it counts, for messages.
        points: ascending, at least two.
    """

    name: str
    points: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = zip(self.points, self.points[1:], strict=False)
        if len(self.points) < 2 or any(after <= before for before, after in pairs):
            raise ConfigError(f"axis {self.name}: needs two or more ascending points")

    def locate(self, value: float) -> tuple[int, float]:
        """Return the segment that a value is in, and its share of that segment.

        The share is above 1 beyond the last point, and below 0 before the first one.

        Raises:
            OutsideProfileError: the value is above twice the last point, or below half the first.
        """
        points = self.points
        if not points[0] / 2 <= value <= 2 * points[-1]:
            raise OutsideProfileError(
                f"{self.name} {value:g} is outside the profile, which covers {points[0]:g} to "
                f"{points[-1]:g} and is continued to {2 * points[-1]:g} at most"
            )
        i = bisect_right(points, value, 1, len(points) - 1) - 1
        return i, (value - points[i]) / (points[i + 1] - points[i])

    def covers(self, value: float) -> bool:
        """Whether a value lies in the range itself, so that nothing is continued for it."""
        return self.points[0] <= value <= self.points[-1]


@dataclass(frozen=True, slots=True)
class Line:
    """Values over one axis."""

    axis: Axis
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.axis.points):
            raise ConfigError(f"axis {self.axis.name}: one value is needed for each point")

    def at(self, value: float) -> float:
        """Return the value at a point.

        Raises:
            OutsideProfileError: see :meth:`Axis.locate`.
        """
        i, share = self.axis.locate(value)
        return max(0.0, self.values[i] + share * (self.values[i + 1] - self.values[i]))


@dataclass(frozen=True, slots=True)
class Plane:
    """Values over two axes; ``values`` has a row for each point of the first one."""

    rows: Axis
    columns: Axis
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.values}
        if len(self.values) != len(self.rows.points) or widths != {len(self.columns.points)}:
            raise ConfigError(
                f"grid of {self.rows.name} and {self.columns.name}: wrong number of values"
            )

    def at(self, row: float, column: float) -> float:
        """Return the value at a point.

        Raises:
            OutsideProfileError: see :meth:`Axis.locate`.
        """
        i, down = self.rows.locate(row)
        j, right = self.columns.locate(column)
        above = _between(self.values[i], j, right)
        below = _between(self.values[i + 1], j, right)
        return max(0.0, above + down * (below - above))


def _between(values: Sequence[float], i: int, share: float) -> float:
    return values[i] + share * (values[i + 1] - values[i])
