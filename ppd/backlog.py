"""Tokens that workers were sent to prefill and have not answered yet.

They are reservations: a turn's tokens are added in the step in which it is decided, so that turns
decided at once see each other and cannot stampede to one worker.
"""

from __future__ import annotations

from collections.abc import Callable


class Backlog:
    """Tokens in the prefill queues of all workers, by identity.

    Attributes:
        on_change: called after each change; None: nothing is.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] | None = None
        self._tokens: dict[str, int] = {}

    def all(self) -> dict[str, int]:
        """Return the tokens of all workers that have any."""
        return dict(self._tokens)

    def of(self, worker: str) -> int:
        """Tokens in a worker's queue."""
        return self._tokens.get(worker, 0)

    def add(self, worker: str, tokens: int) -> None:
        """Reserve a turn's tokens."""
        assert tokens >= 0
        self._tokens[worker] = self.of(worker) + tokens
        if self.on_change is not None:
            self.on_change()

    def remove(self, worker: str, tokens: int) -> None:
        """Give back exactly what was added: the worker has answered, or never will."""
        left = self.of(worker) - tokens
        assert left >= 0, "removed more than was added"
        if left:
            self._tokens[worker] = left
        else:
            self._tokens.pop(worker, None)
        if self.on_change is not None:
            self.on_change()
