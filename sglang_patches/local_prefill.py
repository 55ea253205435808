"""The local side of a decode server: a queue of its own and the step that serves it.

Upstream's decode loop never prefills, and there ``waiting_queue`` means "KV already
received" (an abort frees the KV of each entry), so local requests wait elsewhere. This
module owns that queue, its counters and the scheduling step; which engine functions are
wrapped, and why, stands in ``hooks.py``.

Engine objects (scheduler, request, batch) are SGLang 0.5.21's and untyped here.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from ppd.contract import Refusal, RefusalReason, parse_terms
from ppd.errors import ContractError

logger = logging.getLogger("ppd.engine")

# Stands in a local request's ``bootstrap_room``; real rooms are never negative.
LOCAL_ROOM = -1


def is_local(req: Any) -> bool:
    """Whether ``req`` is (or will be) prefilled on this decode server."""
    return bool(req.bootstrap_room == LOCAL_ROOM)


@dataclass(slots=True)
class Counters:
    """What has happened since the server started; shown in ``/server_info``."""

    accepted: int = 0
    refused_too_few_cached: int = 0
    refused_too_many_tokens: int = 0
    refused_malformed: int = 0
    evicted_while_waiting: int = 0  # accepted, then refused after all
    aborted_in_queue: int = 0
    requeued: int = 0
    chunks: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0


@dataclass(slots=True)
class LocalPrefills:
    """Local requests of one scheduler, from arrival until their prefill is launched."""

    scheduler: Any
    max_append_tokens: int
    queue: list[Any] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    # Names this process: a router tells a restart from a pause by it.
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Requests of the extend batch that the coming step runs beside, or directly after.
    just_merged: tuple[Any, ...] = ()
    # Upstream's waiting_queue while ours stands in its place.
    _received: list[Any] | None = None

    # -- requests in ------------------------------------------------------------------

    def admit(self, req: Any) -> None:
        """Queue a new local request, or refuse it before any work.

        The refusal's status is 503: of the codes that SGLang's tokenizer manager turns
        into an HTTP status (1802-1826), the one that says "not here, not now".
        """
        from sglang.srt.disaggregation.utils import is_unadmitted_reject

        if is_unadmitted_reject(req):  # e.g. too long a prompt: upstream has the message
            self.scheduler.retire_unadmitted_request(req)
            return
        try:
            least = parse_terms(req.sampling_params.custom_params).min_cached_tokens
        except ContractError as error:
            self.counters.refused_malformed += 1
            refusal = Refusal(RefusalReason.MALFORMED_TERMS, detail=str(error))
            self._refuse(req, refusal, HTTPStatus.BAD_REQUEST)
            return
        cached = self._cached_tokens(req)
        if cached < least:
            self.counters.refused_too_few_cached += 1
            self._refuse_uncached(req, cached, least)
            return
        uncached, under_way = len(req.origin_input_ids) - cached, self.append_tokens()
        if under_way + uncached > self.max_append_tokens:
            self.counters.refused_too_many_tokens += 1
            detail = f"{uncached} after {under_way}, at most {self.max_append_tokens}"
            refusal = Refusal(RefusalReason.TOO_MANY_TOKENS, cached, least, detail)
            self._refuse(req, refusal, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self.counters.accepted += 1
        self.counters.cached_tokens += cached
        self.counters.uncached_tokens += uncached
        self._queue(req)

    def _cached_tokens(self, req: Any) -> int:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(self.scheduler.tree_cache, req, req.origin_input_ids, include_req=True)
        return int(req.num_matched_prefix_tokens)

    def _refuse_evicted(self) -> None:
        """Check the precondition again: waiting requests hold no lock on their prefix.

        A lock would let a long queue pin the cache that running requests need.
        """
        kept = []
        for req in self.queue:
            least = parse_terms(req.sampling_params.custom_params).min_cached_tokens
            # A requeued request has begun to answer: it must be finished here, whatever it costs.
            if req.retraction_count == 0 and (cached := self._cached_tokens(req)) < least:
                self.counters.evicted_while_waiting += 1
                self._refuse_uncached(req, cached, least)
            else:
                kept.append(req)
        self.queue = kept

    def requeue(self, req: Any) -> None:
        """Prefill ``req`` again from its tokens, ahead of newer requests.

        For a request that lost its KV and cannot be restored as a transferred one: it
        was paused, or (overlap scheduling) retracted before its first token came back.
        """
        self.counters.requeued += 1
        self._queue(req, first=True)

    def _queue(self, req: Any, *, first: bool = False) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        req.time_stats.disagg_mode = DisaggregationMode.NULL
        req.time_stats.set_wait_queue_entry_time()
        self.queue.insert(0 if first else len(self.queue), req)

    def _refuse_uncached(self, req: Any, cached: int, least: int) -> None:
        refusal = Refusal(
            RefusalReason.TOO_FEW_CACHED_TOKENS, cached_tokens=cached, min_cached_tokens=least
        )
        self._refuse(req, refusal, HTTPStatus.SERVICE_UNAVAILABLE)

    def _refuse(self, req: Any, refusal: Refusal, status: HTTPStatus) -> None:
        from sglang.srt.disaggregation.utils import prepare_abort

        logger.info("local prefill refused: rid=%s %s", req.rid, refusal)
        prepare_abort(req, refusal.to_message(), status_code=status)
        self.scheduler.retire_unadmitted_request(req)

    def abort(self, rid_prefix: str, abort_all: bool, reason: Any) -> None:
        """Drop waiting requests; they hold no KV. Upstream aborts the others."""
        from sglang.srt.managers.scheduler import _make_abort_req

        scheduler = self.scheduler
        dropped = [r for r in self.queue if abort_all or r.rid.startswith(rid_prefix)]
        if not dropped:
            return
        self.queue = [r for r in self.queue if r not in dropped]
        self.counters.aborted_in_queue += len(dropped)
        for req in dropped:
            scheduler._release_aborted_request(req)
            scheduler.beam_coordinator.retire_group(req)
            abort = _make_abort_req(req, finished_reason=reason)
            scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)

    # -- what the rest of the scheduler must count --------------------------------------

    def launched(self) -> list[Any]:
        """Requests whose prefill is under way and which no upstream queue holds."""
        scheduler = self.scheduler
        chunked, last = scheduler.chunked_req, scheduler.last_batch
        launched = [] if chunked is None else [chunked]
        if last is not None and last.forward_mode.is_extend():
            launched += [r for r in last.reqs if r is not chunked and not r.finished()]
        return launched

    def is_being_written(self, req: Any) -> bool:
        """Whether the forward that writes this request's KV may still be running.

        With overlap scheduling a backup taken now could miss it.
        """
        return any(r is req for r in self.just_merged)

    def chunk_rest_tokens(self) -> int:
        """Tokens that the request in mid-prefill still needs KV for."""
        req = self.scheduler.chunked_req
        if req is None:
            return 0
        return max(0, int(len(req.origin_input_ids) + len(req.output_ids) - req.extend_range.end))

    def append_tokens(self) -> int:
        """Uncached tokens of local requests, waiting or in mid-prefill."""
        waiting = sum(len(r.origin_input_ids) - r.num_matched_prefix_tokens for r in self.queue)
        return int(waiting) + self.chunk_rest_tokens()

    def about_to_decode(self) -> list[Any]:
        """Transferred requests that will decode soon, and need room to grow."""
        scheduler = self.scheduler
        received = scheduler.waiting_queue if self._received is None else self._received
        return [*received, *(r.req for r in scheduler.disagg_decode_transfer_queue.queue)]

    def state(self) -> dict[str, Any]:
        chunked = self.scheduler.chunked_req
        return {
            "waiting": len(self.queue),
            "append_tokens": self.append_tokens(),
            "prefilling": 0 if chunked is None else 1,
            "boot_id": self.boot_id,
            **asdict(self.counters),
        }

    # -- the step -----------------------------------------------------------------------

    def has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(
            self.queue
            or scheduler.chunked_req is not None
            or scheduler._pending_chunked_abort_req is not None
            or (scheduler.last_batch and scheduler.last_batch.forward_mode.is_extend())
        )

    def extend(self, running_batch: Any) -> tuple[Any, Any]:
        """The next local prefill batch, if there is one to run now.

        The order is that of ``Scheduler.get_next_batch_to_run`` (scheduler.py:3641):
        finish aborts, keep the last chunk's KV, merge the last extend, then prefill.

        Returns:
            (batch or None, running batch).
        """
        scheduler = self.scheduler
        scheduler.process_pending_chunked_abort()
        running_batch = self._merge_last_extend(running_batch)
        decodes_wait = not running_batch.is_empty() or bool(scheduler.waiting_queue)
        if decodes_wait and scheduler._should_defer_prefill():
            return None, running_batch
        if scheduler.chunked_req is None and (
            not self.queue or scheduler.disagg_decode_prealloc_queue.retracted_queue
        ):
            return None, running_batch  # memory is short: retracted requests come first
        if not self._next_chunk_fits():
            return None, running_batch  # decodes free some by ending, or by being retracted
        self._refuse_evicted()
        running_batch.batch_is_full = False  # upstream's decode loop never clears it
        with self._in_place_of_waiting_queue():
            plan = scheduler.get_new_batch_prefill(running_batch)
        if plan.batch_to_run is not None:
            self.counters.chunks += 1
            scheduler._arm_prefill_decode_interval(plan.batch_to_run)
        return plan.batch_to_run, plan.running_batch

    def _next_chunk_fits(self) -> bool:
        """Whether the request in mid-prefill can go on now.

        Its KV was there when it was admitted, but decode steps between its chunks take more
        than the share that admission expects of them; and upstream ends the process if the
        allocation of a chunk fails (mem_cache/allocation.py:169).
        """
        scheduler = self.scheduler
        size = scheduler.chunked_prefill_size
        if scheduler.chunked_req is None or size is None:
            return True
        free = scheduler.token_to_kv_pool_allocator.available_size()
        free += scheduler.disagg_decode_prealloc_queue._radix_full_evictable()
        return bool(free >= min(size, self.chunk_rest_tokens()) + 2 * scheduler.page_size)

    def _merge_last_extend(self, running_batch: Any) -> Any:
        scheduler = self.scheduler
        chunked, last = scheduler.chunked_req, scheduler.last_batch
        exclude = []
        self.just_merged = ()
        if chunked is not None:
            exclude.append(chunked)
            if chunked.extend_range.end > len(chunked.prefix_indices):
                scheduler.stash_chunked_request(chunked)
        if not (last and last.forward_mode.is_extend()):
            return running_batch
        if last.chunked_req is not None:
            exclude.append(last.chunked_req)
        last.filter_batch(chunked_req_to_exclude=exclude)
        self.just_merged = tuple(last.reqs)
        if last.is_empty():
            return running_batch
        if running_batch.is_empty():
            return last
        running_batch.merge_batch(last)
        return running_batch

    @contextmanager
    def _in_place_of_waiting_queue(self) -> Iterator[None]:
        """Let upstream's prefill scheduling read our queue.

        Preemption is off meanwhile: it would requeue a running request as a new one.
        """
        scheduler = self.scheduler
        preemption = scheduler.enable_priority_preemption
        self._received, scheduler.waiting_queue = scheduler.waiting_queue, self.queue
        scheduler.enable_priority_preemption = False
        try:
            yield
        finally:
            scheduler.enable_priority_preemption = preemption
            self.queue, scheduler.waiting_queue = scheduler.waiting_queue, self._received
            self._received = None

    @contextmanager
    def chunk_set_aside(self) -> Iterator[None]:
        """Let upstream's decode step run while a local request is in mid-prefill.

        Upstream asserts there is no such request; and it must keep one slot free for it.
        """
        scheduler = self.scheduler
        chunked = scheduler.chunked_req
        scheduler.chunked_req = None
        scheduler.max_running_requests -= chunked is not None
        try:
            yield
        finally:
            scheduler.chunked_req = chunked
            scheduler.max_running_requests += chunked is not None
