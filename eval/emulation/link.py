"""A worker's end of the emulated link."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .knobs import SharedKnobs


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one worker.

    Attributes:
        worker: the sender.
        kv_bytes_per_token: of the emulated model.
    """

    worker: str
    kv_bytes_per_token: int
    knobs: SharedKnobs

    def reserve(self, receiver: str, tokens: int) -> float:
        """Take both ends of the link for the KV of some tokens; return when that ends.

        Args:
            receiver: the other worker's name in Mooncake.
        """
        kv_bytes = tokens * self.kv_bytes_per_token
        return self.knobs.reserve(self.worker, receiver, kv_bytes, time.monotonic())[1]

    def wait_until(self, end_s: float) -> None:
        """Sleep until the end of a transfer."""
        time.sleep(max(0.0, end_s - time.monotonic()))
