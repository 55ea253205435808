"""The measurements of one turn, and its histogram of gaps between tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_FINEST_MS = 0.01
_STEP = math.log(1.05)


class Failure(StrEnum):
    """Why a turn is no success."""

    TIMEOUT = "timeout"
    DROPPED = "dropped"  # no connection, or one that ended before the answer did
    REFUSED = "refused"  # a status other than 200
    ERROR = "error"  # reported inside the stream
    SHORT = "short"  # another number of tokens than asked for
    MALFORMED = "malformed"  # no answer of /generate


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one turn.

    Attributes:
        conversation, turn: which one; turns count from 1.
        sent_at_s: since the start of the run; ``late_ms`` after it was due.
        context_tokens: of the history that it was sent with, prompts and replies.
        output_tokens: asked for and, unless ``error`` is set, received.
        cached_tokens: of the prompt, as the engine reports them.
        route, reason: as the router's headers say.
        ttft_ms: from the send to the first event with a token.
        tpot_ms: from the first to the last such event, for each token after the first.
        error: why the turn failed; its conversation ends there.
        failure: the same, as one of few.
        e2e_ms: from the send to the end of the answer, or to the failure.
        gaps: histogram of the times between events with tokens: (bucket, count), see
            :func:`gap_bucket`. What it takes grows with the buckets, not with the tokens.
    """

    conversation: int
    turn: int
    sent_at_s: float
    late_ms: float
    context_tokens: int
    new_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    route: str = ""
    reason: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    error: str = ""
    failure: Failure | None = None
    e2e_ms: float = 0.0
    gaps: tuple[tuple[int, int], ...] = ()


def gap_bucket(gap_ms: float) -> int:
    """Return a gap's bucket: buckets are 5 % wide, and 0 holds all up to 0.01 ms."""
    return max(0, math.ceil(math.log(gap_ms / _FINEST_MS) / _STEP)) if gap_ms > 0 else 0


def gap_bound_ms(bucket: int) -> float:
    """Return the longest gap in a bucket."""
    return _FINEST_MS * math.exp(_STEP * bucket)


def gaps_of(counts: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return a histogram's buckets in order."""
    return tuple(sorted(counts.items()))


def sum_gaps(gaps: list[tuple[tuple[int, int], ...]]) -> Counter[int]:
    """Add up histograms."""
    total: Counter[int] = Counter()
    for histogram in gaps:
        for bucket, count in histogram:
            total[bucket] += count
    return total


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the fields of a run's turns that tables and figures need, a list for each field.

    Rows of their own would repeat the fields' names.
    """
    return {
        "turn": [sample.turn for sample in samples],
        "prompt_tokens": [sample.context_tokens + sample.new_tokens for sample in samples],
        "cached_tokens": [sample.cached_tokens for sample in samples],
        "route": [sample.route for sample in samples],
        "ttft_ms": [sample.ttft_ms for sample in samples],
        "tpot_ms": [sample.tpot_ms for sample in samples],
        "e2e_ms": [sample.e2e_ms for sample in samples],
        "failure": [sample.failure for sample in samples],
    }
