"""The ways in which a fake worker fails, and what it keeps of each request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """A way in which a worker fails."""

    NONE = "none"
    LATE = "late"  # waits for a while, then answers
    HANGS = "hangs"  # never answers
    HOLDS = "holds"  # the first event, then nothing
    FAILS = "fails"  # status 500
    REJECTS = "rejects"  # status 400
    DROPS = "drops"  # closes the connection without a word
    RESETS = "resets"  # the connection, behind some events
    ENDS_EARLY = "ends_early"  # in good order, but without [DONE]
    ERROR_FIRST = "error_first"  # the first event is an error, status 200
    ERROR_LATER = "error_later"  # some events, an error, [DONE]
    ERROR_ENDS = "error_ends"  # some events, an error, and the end without [DONE]


WITH_KV = (Fault.NONE, Fault.LATE)  # ways in which a prefill worker transfers KV


@dataclass(slots=True)
class Leg:
    """One request to a worker; times are those of ``time.monotonic``."""

    body: bytes
    began_s: float
    given_up_s: float | None = None  # by the other side, before it was answered


@dataclass(slots=True)
class Behaviour:
    """How fast a worker answers.

    Attributes:
        late_s: how late ``LATE`` is.
        pace_s: between two events of a stream; 0: all at once.
    """

    late_s: float = 2.0
    pace_s: float = 0.0
