"""Moves the reservation and the flush timeout to where neither prefill nor decode suffers more.

A feedback loop after Trinity's (section 3.3). Knows no clock: it is told what the last interval
looked like, and answers with the controls of the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .schedule import MAX_RESERVED, Controls

_GAIN = 0.15  # of the reservation, for each unit of pressure
_FLUSH_GAIN = 0.5  # of the timeout's logarithm
_MAX_PRESSURE = 1.0  # in one interval
_DEAD_BAND = 0.1


class Move(StrEnum):
    """Why the controls are as they are."""

    PREFILL_WAITS = "prefill_waits"
    DECODE_STALLS = "decode_stalls"
    LINK_BUSY = "link_busy"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an interval looked like.

    Attributes:
        kv_link_use: share of the KV link that is used, 0 to 1.
        prefill_wait_p95_ms: of searches for prefill, from arrival to answer.
        decode_stall: share of decode time that is spent waiting for searches, 0 to 1.
    """

    kv_link_use: float
    prefill_wait_p95_ms: float
    decode_stall: float


@dataclass(frozen=True, slots=True)
class Aims:
    """What is held to be enough.

    Attributes:
        link_busy: a KV link used more than that gains nothing from faster prefills.
    """

    prefill_wait_p95_ms: float = 5.0
    decode_stall: float = 0.05
    link_busy: float = 0.9
    min_reserved: float = 0.05
    max_reserved: float = MAX_RESERVED
    min_flush_s: float = 0.0002
    max_flush_s: float = 0.05


class ControlLoop:
    def __init__(self, aims: Aims, controls: Controls) -> None:
        self.aims = aims
        self.controls = controls

    def step(self, seen: Feedback) -> Move:
        """Take one interval's feedback; ``controls`` are the next one's."""
        aims = self.aims
        wait = seen.prefill_wait_p95_ms / aims.prefill_wait_p95_ms
        stall = seen.decode_stall / aims.decode_stall
        link_busy = seen.kv_link_use > aims.link_busy
        # What prefill would gain ends up behind the link's queue.
        wait_over = 0.0 if link_busy else max(0.0, math.log2(max(wait, 1e-9)))
        stall_over = max(0.0, math.log2(max(stall, 1e-9)))
        pressure = wait_over - stall_over
        if link_busy and stall_over == 0.0:
            pressure = -_DEAD_BAND * 2
        if abs(pressure) <= _DEAD_BAND:
            return Move.STEADY
        pressure = max(-_MAX_PRESSURE, min(pressure, _MAX_PRESSURE))
        reserved = self.controls.reserved + _GAIN * pressure
        flush_s = self.controls.flush_s * math.exp(-_FLUSH_GAIN * pressure)
        self.controls = Controls(
            reserved=max(aims.min_reserved, min(reserved, aims.max_reserved)),
            flush_s=max(aims.min_flush_s, min(flush_s, aims.max_flush_s)),
        )
        if pressure > 0:
            return Move.PREFILL_WAITS
        return Move.DECODE_STALLS if stall_over else Move.LINK_BUSY
