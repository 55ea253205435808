"""What other features add to a request while it is served: to its body, to its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from .resume import Insertion


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """What is known of a turn's latency before its route is decided.

    Attributes:
        prefill_ms: TTFT by the decision table; 0 without one.
        ttft_target_ms: the request's own; None without one.
    """

    prefill_ms: float
    ttft_target_ms: float | None


class StreamObserver(Protocol):
    """Reads a stream as its client does, and may find a passage for its model to read.

    Attributes:
        found: resolves with a passage; after ``appended`` or ``declined`` another future.
        room_s: how long the stream's worker may take to prefill the passage.
    """

    found: asyncio.Future[str]
    room_s: float

    def read(self, block: bytes) -> None:
        """Whole events that the client is sent."""
        ...

    def appended(self, appended: tuple[Insertion, ...], stalled_s: float) -> None:
        """The model goes on behind the passage.

        Args:
            appended: all passages that it has read in this reply.
            stalled_s: for how long the stream stood still.
        """
        ...

    def declined(self, stalled_s: float) -> None:
        """The stream goes on without the passage: there was no room for it."""
        ...

    def close(self) -> None:
        """The stream has ended."""
        ...


class RequestHook(Protocol):
    """Completes one request before its route is decided, and observes its stream."""

    async def complete_body(self, estimate: LatencyEstimate) -> bytes:
        """The body that is served; found while the request waits for admission.

        Raises:
            RequestError: the request shall fail.
        """
        ...

    def observer(self) -> StreamObserver | None:
        """The observer of a reply that can be continued; None: there is none."""
        ...


async def complete_while_waiting(
    hook: RequestHook,
    estimate: LatencyEstimate,
    entering: Coroutine[Any, Any, None],
    leave: Callable[[], None],
) -> bytes:
    """Complete a body while the request waits for admission; it is admitted when this returns.

    Args:
        hook: of the request.
        estimate: of its latency.
        entering: ends when the request is admitted.
        leave: undoes an admission.
    """
    waiting = asyncio.ensure_future(entering)
    try:
        body = await hook.complete_body(estimate)
        await waiting
    except BaseException:
        if not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
            leave()
        raise
    return body
