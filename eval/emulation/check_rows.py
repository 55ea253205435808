"""The rows of ``ppd-eval emulate check``: predictions, turns, and their summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppd.errors import PpdError

from .predictions import Cell
from .traces import DeviceUse

_BY_CHANCE = 0.01  # of KV bytes: prompts of random letters may begin alike, and find a token or two


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a cell should show, and the slow motion that it is measured with."""

    cell: Cell
    ttft_ms: float
    kv_bytes: int
    cached_tokens: int
    slow_motion: float

    def row(self) -> dict[str, Any]:
        """Return it as a row."""
        return {
            "row": "prediction",
            "cell": self.cell.name,
            "predicted_ms": round(self.ttft_ms, 3),
            "kv_bytes": self.kv_bytes,
            "cached_tokens": self.cached_tokens,
            "route": self.cell.route,
            "slow_motion": self.slow_motion,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn of a cell."""

    ttft_ms: float
    cached_tokens: int
    kv_bytes: int
    route: str
    use: DeviceUse


def turn_row(predicted: Predicted, measured: Measured, repeat: int) -> dict[str, Any]:
    """Return the row of a turn."""
    return {
        "row": "turn",
        "cell": predicted.cell.name,
        "repeat": repeat,
        "slow_motion": predicted.slow_motion,
        "predicted_ms": round(predicted.ttft_ms, 3),
        "measured_ms": round(measured.ttft_ms, 3),
        "cached_tokens": measured.cached_tokens,
        "kv_bytes": measured.kv_bytes,
        "route": measured.route,
        **measured.use.fields(),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the cells with their medians, the worst bubble share and the least slow motion.

    Raises:
        PpdError: a row's KV bytes or route are not those predicted, or there is no row.
    """
    predictions = {row["cell"]: row for row in rows if row["row"] == "prediction"}
    turns = [row for row in rows if row["row"] == "turn"]
    if not turns:
        raise PpdError("no turn was measured")
    cells = []
    for name, prediction in predictions.items():
        own = [row for row in turns if row["cell"] == name]
        for row in own:
            if row["route"] != prediction["route"]:
                raise PpdError(f"{name}: route {row['route']}, predicted {prediction['route']}")
            if abs(row["kv_bytes"] - prediction["kv_bytes"]) > _BY_CHANCE * prediction["kv_bytes"]:
                raise PpdError(
                    f"{name}: kv_bytes {row['kv_bytes']}, predicted {prediction['kv_bytes']}"
                )
        cells.append(
            {
                "name": name,
                "predicted_ms": prediction["predicted_ms"],
                "measured_ms": round(statistics.median(row["measured_ms"] for row in own), 3),
                "cached_tokens": own[-1]["cached_tokens"],
                "kv_bytes": own[-1]["kv_bytes"],
                "route": own[-1]["route"],
                "repeats": [row["measured_ms"] for row in own],
                "k": prediction["slow_motion"],
            }
        )
    return {
        "cells": cells,
        "bubble_share": max(row["bubble_share"] for row in turns),
        "k": min(row["slow_motion"] for row in turns),
    }


def largest_error(summary: dict[str, Any]) -> float:
    """Return the largest relative error of a cell's median."""
    return max(
        (abs(cell["measured_ms"] / cell["predicted_ms"] - 1) for cell in summary["cells"]),
        default=0.0,
    )
