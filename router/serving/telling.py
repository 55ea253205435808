"""What legs tell while a request waits for its answer, and which worker a failure is held against.

Classes, not functions inside the ones that wait: compiled, those are kept by what they close over,
and each request would leave a cycle to the garbage collector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ppd.contract import Role

from ..workers.worker import Worker
from .holds import Promised, Queued, Spoken
from .legs import Answer, Cause, LegFailed
from .sse import EngineError

logger = logging.getLogger("ppd.router.turns")

_NO_KV = EngineError(504, "prefill worker did not answer, and no KV came from it", "worker_error")


class OneLeg:
    """Of a turn that one worker serves, or of work beside it, for which nothing is promised."""

    def __init__(self, worker: Worker, spoken: Spoken, promised: Promised | None = None) -> None:
        self._worker = worker
        self._spoken = spoken
        self._promised = promised

    def told(self, answer: Answer | LegFailed) -> None:
        _blame(self._worker, answer)
        if self._promised is not None:
            self._promised.spoke()
        self._spoken.told(answer)


class BothLegs:
    """Of a remote turn.

    Args:
        queued: at the prefill worker.
        promised: by the decode worker.
        failed: called if the prefill leg has.
    """

    def __init__(
        self,
        prefill: Worker,
        decode: Worker,
        spoken: Spoken,
        queued: Queued,
        promised: Promised,
        failed: Callable[[LegFailed], None],
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._spoken = spoken
        self._queued = queued
        self._promised = promised
        self._failed = failed
        self._prefilled = False

    def prefill_told(self, answer: Answer | LegFailed) -> None:
        self._queued.close()
        if self._spoken.explains(answer):
            return
        self._prefilled = True
        _blame(self._prefill, answer)
        if isinstance(answer, LegFailed):
            self._failed(answer)
            self._spoken.told(answer)

    def decode_told(self, answer: Answer | LegFailed) -> None:
        if self._spoken.explains(answer):
            return
        silent = isinstance(answer, LegFailed) and answer.cause is Cause.SILENT
        if silent and not self._prefilled:  # it waits for KV that never came
            self.prefill_told(LegFailed(self._prefill, _NO_KV, Cause.SILENT))
        else:
            _blame(self._decode, answer)
            self._promised.spoke()
            self._spoken.told(answer)


def _blame(worker: Worker, answer: Answer | LegFailed) -> None:
    if not isinstance(answer, LegFailed):
        if worker.role is Role.PREFILL or not answer.streams:
            worker.breaker.succeeded()  # whether a stream does is known when it has ended
    elif answer.blames_worker:
        rested = worker.breaker.open
        worker.breaker.failed()
        if worker.breaker.open and not rested:
            logger.error("%s fails request after request: left alone for a while", worker.url)
