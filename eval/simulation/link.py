"""The links that KV goes over: one out of each prefill worker, one into each decode worker."""

from __future__ import annotations


class Link:
    """The link of one worker, which transfers KV, one transfer after the other."""

    def __init__(self, ms_per_token: float) -> None:
        self._ms_per_token = ms_per_token
        self._free_at_ms = 0.0
        self.moved_tokens = 0

    def send(self, tokens: int, now_ms: float, to: Link | None = None) -> float:
        """Transfer KV from now on.

        Args:
            to: the receiver's link, which is busy meanwhile, too; None: it takes any number of
                transfers at once.

        Returns:
            When it has arrived.
        """
        self.moved_tokens += tokens
        free_at_ms = max(now_ms, self._free_at_ms, 0.0 if to is None else to._free_at_ms)
        self._free_at_ms = free_at_ms + tokens * self._ms_per_token
        if to is not None:
            to._free_at_ms = self._free_at_ms
        return self._free_at_ms
