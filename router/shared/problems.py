"""What is wrong with the shared store: logged once, counted, and shown by the dashboard.

None of it costs a request. The router serves with what it has recorded itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from ppd.errors import PpdError

logger = logging.getLogger("ppd.router.shared")

MARK_S = 60.0  # a problem that is an event is shown for so long after the last one


class StoreProblem(StrEnum):
    """Why the router serves without the shared store, or without a part of it."""

    UNREACHABLE = "unreachable"
    SLOW = "slow"
    UNAUTHENTICATED = "unauthenticated"
    FULL = "full"
    READ_ONLY = "read_only"
    REFUSED = "refused"
    EMPTIED = "emptied"
    FOREIGN_FORMAT = "foreign_format"
    MALFORMED = "malformed"
    SEALED = "sealed"

    @property
    def description(self) -> str:
        """What has happened, for the log."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    StoreProblem.UNREACHABLE: "it cannot be reached",
    StoreProblem.SLOW: "it does not answer within timeout_ms",
    StoreProblem.UNAUTHENTICATED: "it refuses the user or a permission",
    StoreProblem.FULL: "its memory is full",
    StoreProblem.READ_ONLY: "it takes no writes",
    StoreProblem.REFUSED: "it refuses a command",
    StoreProblem.EMPTIED: "it has lost its records",
    StoreProblem.FOREIGN_FORMAT: "another version of the router writes to it",
    StoreProblem.MALFORMED: "it has records that cannot be decoded",
    StoreProblem.SEALED: "it has responses that cannot be decrypted",
}


class StoreError(PpdError):
    """A command to the shared store has failed.

    Attributes:
        problem: the kind of failure.
    """

    def __init__(self, problem: StoreProblem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class Side(StrEnum):
    """A task of the router that uses the store."""

    WRITE = "write"
    READ = "read"
    UPKEEP = "upkeep"
    RESPONSES = "responses"


class StoreStatus:
    """The present problems of the store.

    The log has one line when a problem begins, and one when the store works again.

    Args:
        name: of the store, in log lines.
        clock: seconds, monotonic.

    Attributes:
        failure: set when a command fails for the first time.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.failure = asyncio.Event()
        self._name = name
        self._clock = clock
        self._failing: dict[Side, StoreProblem] = {}
        self._marked_until_s: dict[StoreProblem, float] = {}
        self._logged: set[StoreProblem] = set()

    def failed(self, side: Side, error: StoreError) -> None:
        """Record that a command of one side has failed."""
        self._failing[side] = error.problem
        self.failure.set()
        self._log(error.problem, str(error))

    def worked(self, side: Side) -> None:
        """Record that the commands of one side succeed."""
        if self._failing.pop(side, None) is None or self._failing:
            return
        self._logged -= {problem for problem in self._logged if problem not in self._marked_until_s}
        logger.info("the shared store %s works again", self._name)

    def noticed(self, problem: StoreProblem, reason: str) -> None:
        """Record a problem that is an event: it is present for a while."""
        now_s = self._clock()
        if self._marked_until_s.get(problem, now_s) <= now_s:  # it begins anew
            self._logged.discard(problem)
        self._marked_until_s[problem] = now_s + MARK_S
        self._log(problem, reason)

    def present(self) -> set[StoreProblem]:
        """Return the problems that are present now."""
        now_s = self._clock()
        marked = {problem for problem, until_s in self._marked_until_s.items() if until_s > now_s}
        return marked | set(self._failing.values())

    def _log(self, problem: StoreProblem, reason: str) -> None:
        if problem in self._logged:
            return
        self._logged.add(problem)
        logger.error(
            "shared store %s: %s (%s: %s); requests are served with what this router has recorded",
            *(self._name, problem.description, problem, reason),
        )
