"""What a simulation gives: its turns, one row each, and the sums of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.decision import Reason, Route


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn, as its client measured it; of a failed one only its names are meant."""

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


@dataclass(frozen=True, slots=True)
class Result:
    """What one simulated turn took."""

    rows: list[TurnRow]
    ended_s: float
    moved_tokens: int
    evicted_tokens: int
