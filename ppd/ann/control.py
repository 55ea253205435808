"""The control loop of the pool: balances searches of prefill and decode.

It adjusts the reservation and the flush timeout by feedback, after Trinity (section 3.3). It has
no clock: the feedback of the last interval is passed in, and the next controls come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .schedule import MAX_RESERVED, Controls

_GAIN = 0.15  # of the reservation, for each unit of pressure
_FLUSH_GAIN = 0.5  # of the timeout's logarithm
_MAX_PRESSURE = 1.0  # per interval
_DEAD_BAND = 0.1


class Move(StrEnum):
    """The reason of an adjustment of the controls."""

    PREFILL_WAITS = "prefill_waits"
    DECODE_STALLS = "decode_stalls"
    LINK_BUSY = "link_busy"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Feedback:
    """The measurements of one interval.

    Attributes:
        kv_link_use: share of the KV link's bandwidth in use, 0 to 1.
        prefill_wait_p95_ms: 95th percentile of the latency of prefill searches.
        decode_stall: share of decode time that is spent waiting for searches, 0 to 1.
    """

    kv_link_use: float
    prefill_wait_p95_ms: float
    decode_stall: float


@dataclass(frozen=True, slots=True)
class Aims:
    """The targets of the control loop, and the bounds of the controls.

    Attributes:
        prefill_wait_p95_ms: target of the latency of prefill searches.
        decode_stall: target of the share of decode time spent waiting.
        link_busy: above this use of the KV link, faster prefills gain nothing.
        min_reserved: smallest reservation.
        max_reserved: largest reservation.
        min_flush_s: shortest flush timeout.
        max_flush_s: longest flush timeout.
    """

    prefill_wait_p95_ms: float = 5.0
    decode_stall: float = 0.05
    link_busy: float = 0.9
    min_reserved: float = 0.05
    max_reserved: float = MAX_RESERVED
    min_flush_s: float = 0.0002
    max_flush_s: float = 0.05


class ControlLoop:
    """Adjusts the controls after each interval.

    Attributes:
        aims: the targets and bounds.
        controls: the controls of the next interval.
    """

    def __init__(self, aims: Aims, controls: Controls) -> None:
        self.aims = aims
        self.controls = controls

    def step(self, seen: Feedback) -> Move:
        """Update ``controls`` by the feedback of one interval; returns the reason."""
        aims = self.aims
        wait = seen.prefill_wait_p95_ms / aims.prefill_wait_p95_ms
        stall = seen.decode_stall / aims.decode_stall
        link_busy = seen.kv_link_use > aims.link_busy
        # With a busy link, faster prefills would only wait in the link's queue.
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
