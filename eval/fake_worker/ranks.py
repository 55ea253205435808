"""The ranks of a fake worker with data parallelism, and the KV that each of them holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson

from ppd.contract import LOCAL_MARKER, Refusal, RefusalReason

_RANK = "routed_dp_rank"
_REFUSED = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS, cached_tokens=0, min_cached_tokens=1)


@dataclass(slots=True)
class Ranks:
    """The ranks of one server; each has the KV of the conversations that it has served.

    Conversations are told apart by their first message.

    Attributes:
        held: the conversations of each rank.
        silent: ranks that never answer.
        served: the rank of each request.
    """

    held: dict[int, set[str]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    served: list[int] = field(default_factory=list)

    async def take(self, body: bytes, ranks: int) -> str | None:
        """Give a request to its rank: the one that it names, else that of its room.

        Returns:
            The message of a refusal: a local turn whose KV the rank does not hold; else None.

        Raises:
            ValueError: the request names a rank, and there is none such.
        """
        asked = orjson.loads(body)
        rank = asked.get(_RANK)
        rank = asked["bootstrap_room"] % ranks if rank is None else int(rank)
        if not 0 <= rank < ranks:
            raise ValueError(f"{_RANK} must be from 0 to {ranks - 1}, got {rank}")
        self.served.append(rank)
        if rank in self.silent:
            await asyncio.Event().wait()
        opening = asked["messages"][0]["content"]
        held = self.held.setdefault(rank, set())
        if LOCAL_MARKER in asked.get("custom_params", {}) and opening not in held:
            return _REFUSED.to_message()
        held.add(opening)
        return None

    def flush(self) -> None:
        """Empty the caches of all ranks."""
        self.held.clear()

    def swap(self, first: int, second: int) -> None:
        """Exchange the caches of two ranks."""
        self.held[first], self.held[second] = (
            self.held.get(second, set()),
            self.held.get(first, set()),
        )
