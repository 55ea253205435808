"""The control loop of the pool: what prefill's searches may take from decode's.

It adjusts the reservation by feedback, after Trinity (section 3.3). It has no clock: the feedback
of the last interval is passed in, and the next controls come out.

Prefill goes first. The exception is a KV link that is full. Then a prefill waits for the link,
however fast its search was. So the loop gives decode, while its searches are late, what prefill
does not need to keep the link at its target. What decode was given it keeps until the link is
below its target: before that, prefill gains nothing by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .schedule import MAX_RESERVED, Controls

_GAIN = 0.05  # of the reservation, for each interval with the link full


class Move(StrEnum):
    """The reason of an adjustment of the controls."""

    LINK_FULL = "link_full"
    LINK_FREE = "link_free"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Feedback:
    """The measurements of one interval.

    Attributes:
        kv_link_use: share of the KV links' bandwidth in use, 0 to 1.
        decode_wait_p95_ms: 95th percentile of the latency of decode searches.
        token_ms: time between two tokens of a stream; None if it is unknown.
    """

    kv_link_use: float
    decode_wait_p95_ms: float
    token_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Aims:
    """The targets of the control loop, and the bounds of the reservation.

    A stream goes on while a search runs, and its next token comes half a token's time later on
    average. A passage that is found by then could not have been used sooner.

    Attributes:
        kv_link_use: target of the use of the KV links.
        decode_tokens: a decode search that takes longer than so many tokens of a stream is late.
        decode_wait_p95_ms: the same in milliseconds, while the time of a token is unknown.
        min_reserved: smallest reservation.
        max_reserved: largest reservation.
    """

    kv_link_use: float = 0.98
    decode_tokens: float = 0.5
    decode_wait_p95_ms: float = 10.0
    min_reserved: float = 0.05
    max_reserved: float = MAX_RESERVED


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
        aims, before = self.aims, self.controls.reserved
        in_time_ms = aims.decode_wait_p95_ms
        if seen.token_ms is not None:
            in_time_ms = aims.decode_tokens * seen.token_ms
        over = (seen.kv_link_use - aims.kv_link_use) / (1.0 - aims.kv_link_use)
        if over > 0 and seen.decode_wait_p95_ms <= in_time_ms:
            return Move.STEADY
        move = Move.LINK_FULL if over > 0 else Move.LINK_FREE
        reserved = before - _GAIN * max(-1.0, min(over, 1.0))
        self.controls = Controls(max(aims.min_reserved, min(reserved, aims.max_reserved)))
        return Move.STEADY if self.controls.reserved == before else move
