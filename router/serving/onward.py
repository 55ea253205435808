"""Who reads a stream beside its client, and who goes on with it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..intake.inbound import Inbound
from ..workers.worker import Worker
from .context import RequestContext
from .legs import Answer
from .resume import Insertion


class StreamContinuation(Protocol):
    """Ways on for a stream; all raise LegFailed or WorkerError where there is none."""

    async def go_on(self, context: RequestContext, continued: Inbound) -> Answer:
        """The rest, from another worker."""
        ...

    async def prime(self, context: RequestContext, primer: Inbound, worker: Worker) -> None:
        """Have the stream's worker prefill what it shall go on behind, while it runs on.

        One that offers no local prefill is not asked.
        """
        ...

    async def append(self, context: RequestContext, continued: Inbound, worker: Worker) -> Answer:
        """The rest, from the same worker."""
        ...


class Reader(Protocol):
    """Reads a stream as its client does, and may find something for its model to read.

    Attributes:
        found: that, as soon as there is something; after ``appended`` another future.
        room_s: to wait for its worker to prefill that beside the stream.
    """

    found: asyncio.Future[str]
    room_s: float

    def read(self, block: bytes) -> None:
        """The client has got it."""
        ...

    def appended(self, appended: tuple[Insertion, ...], stalled_s: float) -> None:
        """The model goes on behind what was found.

        Args:
            appended: all that it has read so.
            stalled_s: in which the stream stood still for it.
        """
        ...

    def declined(self, stalled_s: float) -> None:
        """The stream goes on without it: there is no room for it, or for the rest behind it."""
        ...

    def close(self) -> None:
        """The stream has ended."""
        ...
