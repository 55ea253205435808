"""The machine that was simulated or emulated, as a line under a table names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_MAX_VALUES = 4  # that are named one by one


def machines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the profiles of some rows, k of an emulation or else the simulator, and the links.

    Returns:
        The parts of a line. An empty list for rows of real machines, and for those that name an
        emulated machine as their hardware.
    """
    named = [row for row in rows if row.get("profile") and "emulated" not in row["hardware"]]
    if not named:
        return []
    profiles = dict.fromkeys(map(_profile, named))
    parts = [f"profile{'s' * (len(profiles) > 1)} {', '.join(profiles)}"]
    links = _numbers(named, "link_gbps")
    if slow := _numbers(named, "slow_motion"):
        parts.append(f"k = {slow}")
    elif links:
        parts.append("simulator")
    return [*parts, f"{links} Gb/s"] if links else parts


def _profile(row: Mapping[str, Any]) -> str:
    factor = row.get("calibration_factor", 1)
    return str(row["profile"]) if factor == 1 else f"{row['profile']} x {factor:g}"


def _numbers(rows: Iterable[Mapping[str, Any]], field: str) -> str:
    """List the values of a field, or their range if they are many."""
    values = sorted({float(row[field]) for row in rows if field in row})
    if len(values) > _MAX_VALUES:
        return f"{values[0]:g} to {values[-1]:g}"
    return ", ".join(f"{value:g}" for value in values)
