"""Measures the duration of scheduling steps and passes it to the pacer and the telemetry.

The duration of a step is known when the next one is scheduled. Where forwards overlap with
scheduling, it is known one step later.

Engine objects (request, batch) are SGLang's and untyped here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppd.pacing import Pacer
from sglang_patches.engines import engine
from sglang_patches.local_queue import LocalQueue
from sglang_patches.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Step:
    """The work of one scheduler step.

    Attributes:
        tokens: tokens that are prefilled; 0 for a step of decodes alone.
        context: mean number of tokens that each of them attends to.
        mixed: whether decodes run in the same forward.
        decodes_wait: whether running decodes wait for the step to end.
        teaches: whether its duration is that of this rank's work.
        completes: requests whose prefill ends with the step.
    """

    tokens: int = 0
    context: float = 0.0
    mixed: bool = False
    decodes_wait: bool = False
    teaches: bool = True
    completes: tuple[Any, ...] = ()


_DECODES_ALONE = _Step()
_CHUNK_OF_PEER = _Step(teaches=False)
_DECODES_BESIDE_PEER = _Step(mixed=True, teaches=False)


class StepTimes:
    """Measures steps, from the calls that the scheduler makes as it schedules them.

    Args:
        queue: the local requests that wait.
        pacer: receives the durations of decode steps and chunks.
        telemetry: receives chunks, decode gaps and completed prefills.
        lag: number of forwards that may still run when a step is scheduled.
        accepted: returns the tokens that speculation has generated since start, and the row steps
            that it took; None without speculation.
    """

    def __init__(
        self,
        queue: LocalQueue,
        pacer: Pacer,
        telemetry: Telemetry,
        lag: int,
        accepted: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._queue = queue
        self._pacer = pacer
        self._telemetry = telemetry
        self._accepted = accepted
        self._counted = (0, 0)
        self._steps: deque[_Step] = deque(maxlen=1 + lag)  # without a pause between them
        self._entered_s = 0.0
        self._gap_ms = 0.0  # since the last token of the decodes that wait
        self._waited = False  # whether requests waited at the last report

    def begin(self) -> None:
        """Record that a step is about to be scheduled, so that an earlier one has ended."""
        now_s = time.perf_counter()
        if len(self._steps) == self._steps.maxlen:
            self._ended(self._steps[0], 1e3 * (now_s - self._entered_s))
            self._complete(self._steps.popleft(), now_s)
        self._report()
        self._entered_s = now_s

    def interrupted(self) -> None:
        """Record that no batch runs; the time until the next step belongs to no step."""
        for step in self._steps:
            self._complete(step, self._entered_s)
        self._steps.clear()
        self._report()
        self._gap_ms = 0.0

    def decodes(self) -> None:
        """Record that a step of decodes alone runs."""
        self._steps.append(_DECODES_ALONE)

    def peer_prefills(self, *, decoding: bool) -> None:
        """Record that decodes, or nothing, run here while another rank prefills."""
        self._steps.append(_DECODES_BESIDE_PEER if decoding else _CHUNK_OF_PEER)

    def prefills(
        self, batch: Any, running_batch: Any, unfinished: Any, *, peers_decode: bool = False
    ) -> None:
        """Record that the prefill ``batch`` runs.

        Args:
            batch: SGLang's batch; decodes may be mixed in.
            running_batch: the decodes that wait, if they are not mixed in.
            unfinished: the request whose prefill does not end with this batch, or None.
            peers_decode: whether other ranks decode in the same step, as mixed decodes do.
        """
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
        alone = running_batch.is_empty()
        self._steps.append(
            _Step(
                tokens,
                context=attended / max(1, tokens),
                mixed=mixed > 0 or (peers_decode and alone and self._pacer.mixed),
                decodes_wait=mixed == 0 and not alone,
                completes=tuple(r for r in requests if r is not unfinished),
            )
        )

    def _ended(self, step: _Step, ms: float) -> None:
        if not step.teaches:
            pass
        elif step.tokens == 0:
            self._pacer.decoded(ms, self._tokens_per_step())
        else:
            self._pacer.chunked(step.tokens, step.context, ms, mixed=step.mixed)
        if step.decodes_wait:
            self._gap_ms += ms
        else:
            if step.mixed or self._gap_ms:
                self._telemetry.decode_gap(self._gap_ms + ms)
            self._gap_ms = 0.0

    def _tokens_per_step(self) -> float:
        """Mean number of tokens that a decode step has given a request since the last call."""
        if self._accepted is None:
            return 1.0
        before, self._counted = self._counted, self._accepted()
        tokens, steps = self._counted[0] - before[0], self._counted[1] - before[1]
        # Upstream sets the counters back when the cache is flushed.
        return tokens / steps if steps > 0 and tokens >= steps else self._pacer.tokens_per_step

    def _complete(self, step: _Step, now_s: float) -> None:
        for req in step.completes:
            if (progress := req.ppd_progress) is not None and not req.is_retracted:
                req.ppd_progress = None
                self._telemetry.prefilled(req.rid, progress, now_s)
        if step.tokens:
            self._report(always=True)

    def _report(self, *, always: bool = False) -> None:
        """Export what waits; also when the last one has left without a prefill."""
        waiting = len(self._queue.requests)
        if waiting or self._waited or always:
            self._telemetry.load(waiting, self._queue.append_tokens(), self._pacer.decode_ms)
        self._waited = waiting > 0
