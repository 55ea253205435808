"""What scheduling steps take, told to the pacer and the telemetry.

What a step took is known when the next one is scheduled, or the one after that where forwards
overlap with scheduling.

Engine objects (request, batch) are SGLang's and untyped here.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ppd.pacing import Pacer
from sglang_patches.engines import engine
from sglang_patches.local_queue import LocalQueue
from sglang_patches.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Step:
    """What one scheduler step runs.

    Attributes:
        tokens: to prefill; 0: decodes alone.
        context: tokens before each of them, on average.
        mixed: decodes are in the same forward.
        decodes_wait: for it to end, if not mixed.
        completes: requests whose prefill ends with it.
    """

    tokens: int = 0
    context: float = 0.0
    mixed: bool = False
    decodes_wait: bool = False
    completes: tuple[Any, ...] = ()


_DECODES_ALONE = _Step()


class StepTimes:
    """
    Args:
        lag: forwards that may still run when a step is scheduled.
    """

    def __init__(self, queue: LocalQueue, pacer: Pacer, telemetry: Telemetry, lag: int) -> None:
        self._queue = queue
        self._pacer = pacer
        self._telemetry = telemetry
        self._steps: deque[_Step] = deque(maxlen=1 + lag)  # without a pause between them
        self._entered_s = 0.0
        self._gap_ms = 0.0  # since the last token of decodes that wait

    def begin(self) -> None:
        """A step is about to be scheduled: an earlier one has ended."""
        now_s = time.perf_counter()
        if len(self._steps) == self._steps.maxlen:
            self._ended(self._steps[0], 1e3 * (now_s - self._entered_s))
            self._complete(self._steps.popleft(), now_s)
        self._entered_s = now_s

    def interrupted(self) -> None:
        """Nothing runs now, and the time until the next step is no step's."""
        for step in self._steps:
            self._complete(step, self._entered_s)
        self._steps.clear()
        self._gap_ms = 0.0

    def decodes(self) -> None:
        """Decodes run now, and nothing else."""
        self._steps.append(_DECODES_ALONE)

    def prefills(self, batch: Any, running_batch: Any, unfinished: Any) -> None:
        """``batch`` runs now; the prefill of ``unfinished`` does not end with it."""
        mixed = len(batch.decoding_reqs or ())
        requests = batch.reqs[: len(batch.reqs) - mixed]
        ends = [engine().extend_end(req) for req in requests]
        sizes = [end - engine().prefix_len(req) for req, end in zip(requests, ends, strict=True)]
        tokens = sum(sizes)
        attended = sum(size * (end - size / 2) for size, end in zip(sizes, ends, strict=True))
        for req in requests:
            if (progress := req.ppd_progress) is not None:
                progress.started_s = progress.started_s or self._entered_s
                progress.chunks += 1
        self._telemetry.chunk(tokens)
        self._steps.append(
            _Step(
                tokens,
                context=attended / max(1, tokens),
                mixed=mixed > 0,
                decodes_wait=mixed == 0 and not running_batch.is_empty(),
                completes=tuple(r for r in requests if r is not unfinished),
            )
        )

    def _ended(self, step: _Step, ms: float) -> None:
        if step.tokens == 0:
            self._pacer.decoded(ms)
        elif step.mixed or not self._pacer.mixed:
            self._pacer.chunked(step.tokens, step.context, ms)
        if step.decodes_wait:
            self._gap_ms += ms
        else:
            if step.mixed or self._gap_ms:
                self._telemetry.decode_gap(self._gap_ms + ms)
            self._gap_ms = 0.0

    def _complete(self, step: _Step, now_s: float) -> None:
        for req in step.completes:
            if (progress := req.ppd_progress) is not None and not req.is_retracted:
                req.ppd_progress = None
                self._telemetry.prefilled(req.rid, progress, now_s)
        if step.tokens:
            queue = self._queue
            waiting, append_tokens = len(queue.requests), queue.append_tokens()
            self._telemetry.load(waiting, append_tokens, self._pacer.decode_ms)
