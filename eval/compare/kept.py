"""Verdicts that were kept where the raw rows are too many: ``results/payoff.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import raw_rows
from . import family


def kept_verdicts(path: Path) -> list[dict[str, Any]]:
    """Return the verdicts of the commit that was judged last, corrected all together.

    Returns:
        A judgement for each trace and machine; none if the file holds other rows, or is missing.

    Raises:
        ConfigError: it cannot be read.
    """
    rows = [row for _, row in raw_rows.read_rows(path)] if path.exists() else []
    judgements = [row for row in rows if row.get("row") == "verdicts"]
    if not judgements:
        return []
    last = max(judgements, key=lambda row: str(row["at"]))
    newest = [row for row in judgements if row["commit"] == last["commit"]]
    family.correct(newest)
    return newest


def machine_of(judgement: Mapping[str, Any]) -> str:
    """Return what tells the machine of a judgement from others: its link, and how much slower."""
    factor = judgement["calibration_factor"]
    slower = "" if factor == 1 else f", x {factor:g}"
    return f"{judgement['link_gbps']:g} Gb/s{slower}"
