"""The queue of local requests, from arrival until their prefill is launched.

Upstream's decode loop never prefills, and its ``waiting_queue`` holds requests whose KV was
received (an abort frees the KV of each entry). So local requests wait in a queue of their own.
This module owns the precondition, the bound, and aborts. ``local_step.py`` owns when and how much
of the queue runs.

Engine objects (scheduler, request) are SGLang's and untyped here. Where their names differ between
versions, ``engines.py`` has both. Line numbers are 0.5.21's.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus
from typing import Any

from ppd.contract import Refusal, RefusalReason, is_marked, terms_of
from ppd.errors import ContractError
from sglang_patches.engines import engine
from sglang_patches.telemetry import LocalPrefillOutcome, Progress, Telemetry

logger = logging.getLogger("ppd.engine")

# Stands in a local request's ``bootstrap_room``; real rooms are never negative.
LOCAL_ROOM = -1


def is_local(req: Any) -> bool:
    """Whether ``req`` is prefilled on this decode server."""
    return bool(req.bootstrap_room == LOCAL_ROOM)


class LocalQueue:
    """The queue of local requests that wait for their prefill.

    Args:
        scheduler: SGLang's scheduler.
        max_append_tokens: uncached tokens that may wait or be in prefill at a time.
        telemetry: receives the outcome of each request.

    Attributes:
        requests: the requests that wait, in order.
        flushes: how often the whole KV cache has been flushed. A router drops its record of the
            worker's KV when this number changes.
    """

    def __init__(self, scheduler: Any, max_append_tokens: int, telemetry: Telemetry) -> None:
        self._scheduler = scheduler
        self._max_append_tokens = max_append_tokens
        self._telemetry = telemetry
        self.requests: list[Any] = []
        self.flushes = 0

    def admit(self, req: Any) -> None:
        """Queue a new local request, or refuse it before any work.

        The status of a refusal is 503: of the codes that SGLang's tokenizer manager turns
        into an HTTP status (1802-1826), this one means that another worker may serve the request.
        """
        from sglang.srt.disaggregation.utils import is_unadmitted_reject

        if is_unadmitted_reject(req):  # e.g. too long a prompt: upstream sends the error
            self._scheduler.retire_unadmitted_request(req)
            return
        try:
            min_cached = terms_of(req.sampling_params.custom_params).min_cached_tokens
        except ContractError as error:
            refusal = Refusal(RefusalReason.MALFORMED_TERMS, detail=str(error))
            self._refuse(req, refusal, HTTPStatus.BAD_REQUEST, LocalPrefillOutcome.MALFORMED_TERMS)
            return
        if req.multimodal_inputs is not None:
            refusal = Refusal(RefusalReason.MEDIA, detail="images, audio and video go remote")
            outcome = LocalPrefillOutcome.MEDIA
            self._refuse(req, refusal, HTTPStatus.SERVICE_UNAVAILABLE, outcome)
            return
        cached = self._cached_tokens(req)
        if cached < min_cached:
            outcome = LocalPrefillOutcome.TOO_FEW_CACHED_TOKENS
            self._refuse_uncached(req, cached, min_cached, outcome)
            return
        uncached, under_way = len(req.origin_input_ids) - cached, self.append_tokens()
        if under_way + uncached > self._max_append_tokens:
            detail = f"{uncached} after {under_way}, at most {self._max_append_tokens}"
            refusal = Refusal(RefusalReason.TOO_MANY_TOKENS, cached, min_cached, detail)
            outcome = LocalPrefillOutcome.TOO_MANY_TOKENS
            self._refuse(req, refusal, HTTPStatus.SERVICE_UNAVAILABLE, outcome)
            return
        # The policy "hrrn" weighs by it. Upstream sets it where it queues requests to be prefilled.
        req.arrival_processed_tokens = self._scheduler.processed_tokens_counter
        req.ppd_progress = Progress(time.perf_counter(), cached, uncached)
        req.ppd_requeued = False
        self._telemetry.accepted(req.ppd_progress)
        if not is_marked(req.sampling_params.custom_params):
            self._telemetry.unroomed(req.rid)
        self._queue(req)

    def requeue(self, req: Any) -> None:
        """Queue ``req`` to be prefilled again from its tokens, ahead of new requests.

        The request lost its KV and cannot be restored like a transferred one. It was paused, it
        was evicted in mid-prefill in favour of decodes, or (with overlap scheduling) it was
        retracted before its first token came back. It is not refused any more. Upstream streams
        an empty event of a request that was retracted so early (output_streamer counts no tokens
        as a full interval). After that event a router cannot retry it on another worker.
        """
        req.ppd_requeued = True
        self._telemetry.requeued()
        self._cached_tokens(req)  # what the cache has of it now: the rest counts as waiting
        self._queue(req, sum(other.ppd_requeued for other in self.requests))

    def _queue(self, req: Any, position: int | None = None) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        req.time_stats.disagg_mode = DisaggregationMode.NULL
        req.time_stats.set_wait_queue_entry_time()
        self.requests.insert(len(self.requests) if position is None else position, req)

    def refuse_evicted(self, tokens: int) -> None:
        """Check the precondition again for the requests that the next ``tokens`` belong to.

        Waiting requests hold no lock on their prefix. With a lock, a long queue would pin cache
        that running requests need.
        """
        kept: list[Any] = []
        for position, req in enumerate(self.requests):
            if self.in_order and tokens <= 0:
                kept += self.requests[position:]
                break
            min_cached = terms_of(req.sampling_params.custom_params).min_cached_tokens
            cached = self._cached_tokens(req)
            if cached < min_cached and not req.ppd_requeued:
                outcome = LocalPrefillOutcome.EVICTED_WHILE_WAITING
                self._refuse_uncached(req, cached, min_cached, outcome)
            else:
                kept.append(req)
                tokens -= len(req.origin_input_ids) - cached
        self.requests = kept

    @property
    def in_order(self) -> bool:
        """Whether the requests run in the order of the queue, and no policy orders them."""
        policy = self._scheduler.policy
        return bool(policy.policy.value == "fcfs" and not policy.enable_priority_scheduling)

    def abort(self, rid_prefix: str, abort_all: bool, reason: Any) -> None:
        """Drop the matching requests that wait; they hold no KV. Upstream aborts the others.

        Args:
            rid_prefix: drop the requests whose id begins with it.
            abort_all: drop all requests instead.
            reason: the finish reason of the response.
        """
        from sglang.srt.managers.scheduler import _make_abort_req

        scheduler = self._scheduler
        dropped = [r for r in self.requests if abort_all or r.rid.startswith(rid_prefix)]
        if not dropped:
            return
        self.requests = [r for r in self.requests if r not in dropped]
        for req in dropped:
            self.ended_early(req)
            scheduler._release_aborted_request(req)
            scheduler.beam_coordinator.retire_group(req)
            abort = _make_abort_req(req, finished_reason=reason)
            engine().send_abort(scheduler, abort, req)

    def ended_early(self, req: Any) -> None:
        """Record that an accepted request will not be prefilled to its end."""
        if req.ppd_progress is not None:
            req.ppd_progress = None
            self._telemetry.ended(LocalPrefillOutcome.ABORTED)

    def append_tokens(self) -> int:
        """The number of uncached tokens of local requests that wait or are in mid-prefill."""
        waiting = sum(
            max(0, len(r.origin_input_ids) + len(r.output_ids) - r.num_matched_prefix_tokens)
            for r in self.requests
        )
        return int(waiting) + self.chunk_rest_tokens()

    def chunk_rest_tokens(self) -> int:
        """The number of tokens for which the request in mid-prefill still needs KV."""
        req = self._scheduler.chunked_req
        if req is None:
            return 0
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        return max(0, tokens - engine().extend_end(req))

    def requeued_tokens(self) -> int:
        """The number of tokens of KV that requests need which were queued again."""
        return int(
            sum(
                len(r.origin_input_ids)
                + len(r.output_ids)
                + engine().decode_reserve()
                - r.num_matched_prefix_tokens
                for r in self.requests
                if r.ppd_requeued
            )
        )

    def _cached_tokens(self, req: Any) -> int:
        engine().match_prefix(self._scheduler, req)
        return int(req.num_matched_prefix_tokens)

    def _refuse_uncached(
        self, req: Any, cached: int, min_cached: int, outcome: LocalPrefillOutcome
    ) -> None:
        refusal = Refusal(
            RefusalReason.TOO_FEW_CACHED_TOKENS,
            cached_tokens=cached,
            min_cached_tokens=min_cached,
            flushes=self.flushes,
        )
        self._refuse(req, refusal, HTTPStatus.SERVICE_UNAVAILABLE, outcome)

    def _refuse(
        self, req: Any, refusal: Refusal, status: HTTPStatus, outcome: LocalPrefillOutcome
    ) -> None:
        from sglang.srt.disaggregation.utils import prepare_abort

        logger.info("local prefill refused: rid=%s %s", req.rid, refusal)
        self._telemetry.ended(outcome)
        prepare_abort(req, refusal.to_message(), status_code=status)
        self._scheduler.retire_unadmitted_request(req)
