"""The link that a prefill worker's KV goes over."""

from __future__ import annotations


class Link:
    """A link that transfers KV, one transfer after the other."""

    def __init__(self, ms_per_token: float) -> None:
        self._ms_per_token = ms_per_token
        self._free_at_ms = 0.0
        self.moved_tokens = 0

    def send(self, tokens: int, now_ms: float) -> float:
        """Transfer ``tokens`` of KV from now on; return when they have arrived."""
        self.moved_tokens += tokens
        self._free_at_ms = max(now_ms, self._free_at_ms) + tokens * self._ms_per_token
        return self._free_at_ms
