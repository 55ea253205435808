"""What a simulation gives: its turns, one row each, and the sums of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.decision import Reason, Route
from ppd.outcome import Outcome


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn, as its client measured it; the times and tokens of a failed one mean nothing.

    Attributes:
        failed: its outcome is not ``ok``, or its client has not waited so long.
    """

    session: int
    turn: int
    route: Route
    reason: Reason
    at_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    moved_tokens: int
    failed: bool
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Result:
    """The turns of a simulation, and sums over its cluster."""

    rows: list[TurnRow]
    ended_s: float
    moved_tokens: int
    evicted_tokens: int
