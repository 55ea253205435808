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
        self._expected: dict[int, int] = {}  # likewise, of those that a prefill worker has
        self._answered: dict[int, int] = {}  # of those with one, since the last report
        self._reserved = 0  # the sum of all

    @property
    def left_tokens(self) -> int | None:
        """Tokens left; None if the worker reports nothing."""
        return None if self._free is None else self._free - self._reserved

    @property
    def unused_tokens(self) -> int | None:
        """Tokens that no request uses yet, wherever it is prefilled; None without a report."""
        left = self.left_tokens
        return None if left is None else left + sum(self._expected.values())

    @property
    def reserved_tokens(self) -> int:
        """Tokens of requests that no report contains yet."""
        return self._reserved

    def report(self, free_tokens: int | None) -> None:
        """Take the worker's report of free tokens; None: it reports no more."""
        self._free = free_tokens
        self._reserved -= sum(self._answered.values())
        self._answered.clear()

    def reserve(self, request: int, tokens: int, *, prefilled_here: bool = True) -> None:
        """Count a request's KV: it is being sent there.

        Args:
            request: its number.
            tokens: of its KV.
            prefilled_here: else its KV comes from a prefill worker, later.
        """
        self.release(request)
        (self._unanswered if prefilled_here else self._expected)[request] = tokens
        self._reserved += tokens

    def answered(self, request: int) -> None:
        """The worker has begun to answer: its next report contains the request."""
        tokens = self._unanswered.pop(request, 0) + self._expected.pop(request, 0)
        if tokens:
            self._answered[request] = tokens

    def release(self, request: int) -> None:
        """The request has ended, or will never be sent; safe to repeat."""
        for counted in (self._unanswered, self._expected, self._answered):
            self._reserved -= counted.pop(request, 0)
