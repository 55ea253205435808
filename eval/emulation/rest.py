"""What the slow motion does not scale: HTTP, handshakes and scheduling, measured without it."""

from __future__ import annotations

import statistics
from typing import Any

from ..raw_rows import Write
from .check import Plan, checker
from .predictions import Way
from .workers import Emulated

_ROUNDS = 5
_CONTEXT = 2048
_GBPS = 100.0


async def measure_rest(emulated: Emulated, write: Write, origin: dict[str, Any]) -> None:
    """Measure turns at k = 1, and write what each took beyond its prediction.

    A row for each way: the median over rounds. The first round only warms up.
    """
    plan = Plan(1.0, 1, (_CONTEXT,), (_GBPS,), (0,), min_wall_s=0.0, strict=False)
    beyond: dict[Way, list[float]] = {way: [] for way in Way}
    async with checker(emulated, plan) as sends:
        for number in range(_ROUNDS + 1):
            async for predicted, measured in sends.group(0, _CONTEXT):
                if number:
                    beyond[predicted.cell.way].append(measured.ttft_ms - predicted.ttft_ms)
    for way, values in beyond.items():
        write(
            {
                "row": "rest",
                "way": way.value,
                "rest_ms": round(statistics.median(values), 3),
                "repeats": [round(value, 3) for value in values],
                **origin,
            }
        )
