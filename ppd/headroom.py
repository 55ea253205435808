"""KV that a decode worker has left: its last report, less what it was sent since."""

from __future__ import annotations


class Headroom:
    """KV left on one worker.

    A request counts from when it is sent until the first report after its first response: from
    then on the report contains its KV.
    """

    def __init__(self) -> None:
        self._free: int | None = None
        self._unanswered: dict[int, int] = {}  # tokens of requests without a response
        self._answered: dict[int, int] = {}  # of those with one, since the last report
        self._reserved = 0  # the sum of both

    @property
    def left_tokens(self) -> int | None:
        """Tokens left; None if the worker reports nothing."""
        return None if self._free is None else self._free - self._reserved

    @property
    def reserved_tokens(self) -> int:
        """Tokens of requests that no report contains yet."""
        return self._reserved

    def report(self, free_tokens: int | None) -> None:
        """Take the worker's report of free tokens; None: it reports no more."""
        self._free = free_tokens
        self._reserved -= sum(self._answered.values())
        self._answered.clear()

    def reserve(self, request: int, tokens: int) -> None:
        """Count a request's KV: it is being sent there."""
        self.release(request)
        self._unanswered[request] = tokens
        self._reserved += tokens

    def answered(self, request: int) -> None:
        """The worker has begun to answer: its next report contains the request."""
        if (tokens := self._unanswered.pop(request, None)) is not None:
            self._answered[request] = tokens

    def release(self, request: int) -> None:
        """The request has ended, or will never be sent; safe to repeat."""
        self._reserved -= self._unanswered.pop(request, 0) + self._answered.pop(request, 0)
