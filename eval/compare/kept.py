"""Verdicts that were kept where the raw rows are too many: ``results/payoff.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .. import raw_rows
from . import family

Row = TypeVar("Row", bound=Mapping[str, Any])


def kept_verdicts(path: Path) -> list[dict[str, Any]]:
    """Return the newest verdicts of each traffic and machine, corrected all together.

    Returns:
        An empty list if the file holds other rows, or is missing.

    Raises:
        ConfigError: it cannot be read.
    """
    rows = [row for _, row in raw_rows.read_rows(path)] if path.exists() else []
    judgements = [row for row in rows if row.get("row") == "verdicts"]
    if not judgements:
        return []
    judgements = newest(judgements)
    family.correct(judgements)
    return judgements


def newest(judgements: Iterable[Row]) -> list[Row]:
    """Return of each traffic, machine and shape the judgement that was made last.

    They are in the order in which each was judged first.
    """
    found: dict[tuple[str, ...], Row] = {}
    for one in sorted(judgements, key=lambda row: str(row["at"])):
        found[one["trace"], one["profile"], one["shape"], machine_of(one)] = one
    return list(found.values())


def machine_of(judgement: Mapping[str, Any]) -> str:
    """Return what tells the machine of a judgement from others: its link, and how much slower."""
    factor = judgement["calibration_factor"]
    slower = "" if factor == 1 else f", x {factor:g}"
    return f"{judgement['link_gbps']:g} Gb/s{slower}"
