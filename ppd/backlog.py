"""Tokens that workers have been sent to prefill and have not answered yet.

On a decode worker these are reservations: a local turn's tokens are added in the same step in
which it is decided, so that turns decided at once see each other and cannot stampede.
"""

from __future__ import annotations


class Backlog:
    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def of(self, worker: str) -> int:
        return self._tokens.get(worker, 0)

    def add(self, worker: str, tokens: int) -> None:
        assert tokens >= 0
        self._tokens[worker] = self.of(worker) + tokens

    def remove(self, worker: str, tokens: int) -> None:
        """Exactly what was added: the worker has answered, or never will."""
        left = self.of(worker) - tokens
        assert left >= 0, "removed more than was added"
        if left:
            self._tokens[worker] = left
        else:
            self._tokens.pop(worker, None)
