"""What goes along with a request through the turn server, and adds to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from .onward import Reader


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """What is known of a turn before it is decided about.

    Attributes:
        prefill_ms: TTFT that the table says it will have; 0 if none does.
        ttft_target_ms: the sender's own.
    """

    prefill_ms: float
    ttft_target_ms: float | None


class RequestHook(Protocol):
    """Of one request."""

    async def completed(self, outlook: LatencyEstimate) -> bytes:
        """The body that is served, found out while the request waits to be let in by the one it
        has.

        Raises:
            RequestError: the request shall fail.
        """
        ...

    def reader(self) -> Reader | None:
        """Of the answer, if it streams and can be continued."""
        ...


async def completed(
    companion: RequestHook,
    outlook: LatencyEstimate,
    entering: Coroutine[Any, Any, None],
    leave: Callable[[], None],
) -> bytes:
    """The whole body, found out while the request waits to be let in; it is in then.

    Args:
        entering: ends when it is.
        leave: undoes that.
    """
    waiting = asyncio.ensure_future(entering)
    try:
        body = await companion.completed(outlook)
        await waiting
    except BaseException:
        if not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
            leave()
        raise
    return body
