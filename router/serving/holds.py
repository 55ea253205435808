"""What a request holds while its legs are open, and what it waits for."""

from __future__ import annotations

import asyncio

from ppd.backlog import Backlog

from ..workers.worker import Worker
from .context import RequestContext
from .legs import Answer, Cause, LegFailed


class Queued:
    """Tokens in a worker's queue until it has spoken, or never will."""

    def __init__(self, backlog: Backlog, identity: str, tokens: int) -> None:
        self._backlog = backlog
        self._of = (identity, tokens)
        self._left = False
        backlog.add(identity, tokens)

    def close(self) -> None:
        if not self._left:
            self._left = True
            self._backlog.remove(*self._of)


class Promised:
    """KV that a request will need on the worker that decodes it."""

    def __init__(self, worker: Worker, context: RequestContext) -> None:
        self._headroom, self._number = worker.headroom, context.number
        self._headroom.sent(context.number, context.kv_tokens)

    def spoke(self) -> None:
        self._headroom.spoke(self._number)

    def close(self) -> None:
        self._headroom.ended(self._number)


class Spoken:
    """The decode worker's answer, or what came in its way first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Answer] = loop.create_future()
        self._failed = False

    def explains(self, answer: Answer | LegFailed) -> bool:
        """Whether a leg is only silent because the other one has failed."""
        silent = isinstance(answer, LegFailed) and answer.cause is Cause.SILENT
        return silent and self._failed

    def told(self, answer: Answer | LegFailed) -> None:
        if self.future.done():
            return  # cancelled, with whoever waited for it; or the other leg was first
        if isinstance(answer, LegFailed):
            self._failed = True
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)
