"""How much KV a decode worker has left, by what it said last and what it was sent since."""

from __future__ import annotations


class Headroom:
    """A request counts from when it is sent until the worker has told again after it spoke: then
    its KV is in what is told."""

    def __init__(self) -> None:
        self._free: int | None = None
        self._silent: dict[int, int] = {}  # tokens of requests that have not spoken
        self._spoken: dict[int, int] = {}  # and of those that have, since the worker told
        self._promised = 0  # the sum of both

    @property
    def left_tokens(self) -> int | None:
        """None if the worker tells nothing."""
        return None if self._free is None else self._free - self._promised

    def told(self, free_tokens: int) -> None:
        self._free = free_tokens
        self._promised -= sum(self._spoken.values())
        self._spoken.clear()

    def sent(self, request: int, tokens: int) -> None:
        self.ended(request)
        self._silent[request] = tokens
        self._promised += tokens

    def spoke(self, request: int) -> None:
        if (tokens := self._silent.pop(request, None)) is not None:
            self._spoken[request] = tokens

    def ended(self, request: int) -> None:
        self._promised -= self._silent.pop(request, 0) + self._spoken.pop(request, 0)
