"""The functions that the hooks on SGLang's scheduler call; ``hooks.py`` lists the hooks.

Every function is thin: it reads engine state, calls the scheduler's ``Plugin``, and writes back.
Signatures are those of SGLang's hook registry: an *around* hook gets the original first,
an *after* hook gets the result first. A server that is no decode server, or a request
that is not local, takes the original path.
"""

from __future__ import annotations

from typing import Any

from ppd.contract import is_marked
from sglang_patches.engines import engine
from sglang_patches.local_queue import LOCAL_ROOM, is_local
from sglang_patches.plugin import Plugin


def is_decode(scheduler: Any) -> bool:
    """Whether ``scheduler`` is that of a decode server."""
    return bool(scheduler.disaggregation_mode.value == "decode")


def handle_generate_request(
    original: Any, self: Any, recv_req: Any, *, mm_input_error: Any = None
) -> Any:
    """Give a request for a local prefill the local room, so that it passes the check for a room."""
    if is_decode(self):
        room = recv_req.bootstrap_room
        if room is not None and room < 0:
            room = None  # only this hook sets such rooms; upstream refuses one without a room
        if room is None and (
            self.ppd.unroomed or is_marked(recv_req.sampling_params.custom_params)
        ):
            room = LOCAL_ROOM
        recv_req.bootstrap_room = room
    return original(self, recv_req, mm_input_error=mm_input_error)


def add_request_to_queue(original: Any, self: Any, req: Any, is_retracted: bool = False) -> Any:
    """Queue a local request in the local queue; other requests take the original path."""
    if not (is_decode(self) and is_local(req)):
        return original(self, req, is_retracted=is_retracted)
    if is_retracted:
        if self.ppd.can_be_restored(req):
            return original(self, req, is_retracted=True)
        _drop_backup(self, req)
        self.ppd.queue.requeue(req)
    elif self._set_or_validate_priority(req):
        self.ppd.queue.admit(req)
    else:
        self._release_aborted_request(req)
    return None


def _drop_backup(scheduler: Any, req: Any) -> None:
    from sglang.srt.mem_cache.common import discard_kv_cache_backup
    from sglang.srt.runtime_context import get_disagg

    if req.kv.retraction_backup is not None:
        backend = get_disagg().disaggregation_decode_retraction_backup
        discard_kv_cache_backup(req, scheduler.tree_cache, backend)


def get_next_disagg_decode_batch_to_run(original: Any, self: Any, running_batch: Any) -> Any:
    """Schedule a step, in which local prefill and decoding take turns or share a forward."""
    step = self.ppd.step
    step.begin()
    plan = _next_batch(original, self, running_batch)
    step.scheduled(plan.batch_to_run, plan.running_batch)
    return plan


def _next_batch(original: Any, scheduler: Any, running_batch: Any) -> Any:
    step = scheduler.ppd.step
    if not step.has_work():
        step.just_merged = ()
        return original(scheduler, running_batch=running_batch)

    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.observability.req_time_stats import set_schedule_time_batch

    batch, running_batch = step.extend(running_batch)
    if batch is not None:
        # With DP attention all ranks run their steps together. Upstream's own step, below, does
        # this too, so every iteration of a rank does it once.
        batch = scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        set_schedule_time_batch(batch)
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
    step.give_way(running_batch)
    with step.chunk_set_aside():
        return original(scheduler, running_batch=running_batch)


def process_decode_queue(original: Any, self: Any) -> None:
    """Take up finished transfers, or one retracted request, where upstream would wait for ever."""
    original(self)
    queue, transfers = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
    if not queue.retracted_queue or self.ppd.running or self.waiting_queue:
        return
    if any(req is not self.chunked_req for req in self.ppd.step.launched()):
        return  # it decodes next
    self.waiting_queue.extend(transfers.pop_transferred())
    if not self.waiting_queue and not transfers.queue:
        self.waiting_queue.extend(_restore_alone(queue))


def _restore_alone(queue: Any) -> Any:
    """Restore the first retracted request, without a reserve of KV for its decoding."""
    reserved, queue.num_reserved_decode_tokens = queue.num_reserved_decode_tokens, 0
    try:
        return queue.resume_retracted_reqs([queue.retracted_queue[0].rid])
    finally:
        queue.num_reserved_decode_tokens = reserved


def init_prefill_adder(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Reserve KV for the decoding of requests whose transfer is under way or done."""
    plugin: Plugin | None = getattr(self.tree_cache, "ppd", None)
    if plugin is not None and plugin.takes_appends:
        reserve = engine().decode_reserve()
        self.memory_budget.total_offset += sum(
            self._get_running_request_total_token_offset(req) + reserve
            for req in plugin.step.about_to_decode()
        )


def can_schedule_lora_req(original: Any, self: Any, req: Any, running_loras: Any) -> bool:
    """Count the adapters of local prefills in flight and of requests in transfer, too."""
    if is_decode(self):
        step = self.ppd.step
        others = [*step.launched(), *step.about_to_decode()]
        running_loras = running_loras | {other.lora_id for other in others}
    return bool(original(self, req, running_loras))


def active_req_count(original: Any, self: Any, extra_reserved_reqs: int = 0) -> int:
    """Count the local prefills in flight as active requests."""
    return int(original(self, extra_reserved_reqs)) + len(self.scheduler.ppd.step.launched())


def allocatable_token_budgets(result: int, self: Any, *args: Any, **kwargs: Any) -> int:
    """Reserve KV for the rest of the request in mid-prefill, and for its first decode step.

    New transfers also leave the KV of local requests that were queued again. Retracted requests
    do not: they come before these.
    """
    queue = self.scheduler.ppd.queue
    rest = queue.chunk_rest_tokens()
    reserved = int(rest + engine().decode_reserve() if rest else 0)
    for_transfers = kwargs.get("count_retracted", args[1] if len(args) > 1 else True)
    return result - reserved - (queue.requeued_tokens() if for_transfers else 0)


def hold_rebootstrap(original: Any, self: Any, req: Any) -> Any:
    """Queue a paused local request again, so that it is recomputed on this server."""
    if not is_local(req):
        return original(self, req)
    # No prefill worker has this request. Undo what pause_generation (scheduler.py:5652)
    # prepared for a transfer, and prefill all of its tokens here again on resume.
    if req.pd_rebootstrap_forced_output_id is not None:
        req.output_ids.append(req.pd_rebootstrap_forced_output_id)
        req.pd_rebootstrap_forced_output_id = None
    req.pd_rebootstrap_in_progress = False
    self.scheduler.ppd.queue.requeue(req)
    return None


def pause_generation(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Exclude the pause from the measured step times."""
    self.ppd.step.interrupted()


def abort_request(original: Any, self: Any, recv_req: Any) -> Any:
    """Abort matching requests of the local queue, then upstream's."""
    self.ppd.queue.abort(recv_req.rid, recv_req.abort_all, recv_req.finished_reason)
    return original(self, recv_req)


def is_fully_idle(
    result: bool, self: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """Whether the scheduler is idle, with local requests and unreleased transfers as work."""
    if not (result and is_decode(self)):
        return result
    transfers = self.disagg_decode_transfer_queue
    if self._engine_paused:  # a paused loop does not reach the place where upstream resolves them
        transfers.resolve_deferred_releases()
    if transfers.has_pending_deferred_releases():
        return False
    return ignore_waiting or not self.ppd.queue.requests


def flush_cache(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Count a flush of the whole cache."""
    self.ppd.queue.flushes += bool(result)  # False: refused, because requests are running
    return result


def get_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """Add the worker's description to the internal state."""
    result.internal_state["ppd"] = self.ppd.description().to_json_object()
    return result


def poll_timeout_aborts(original: Any, self: Any) -> Any:
    """Apply upstream's waiting timeout to the local queue as well."""
    received = self.waiting_queue
    self.waiting_queue = [*received, *self.ppd.queue.requests]
    try:
        return original(self)
    finally:
        self.waiting_queue = received


def accept_output(original: Any, self: Any, *, req: Any) -> Any:
    """Stream a local request's output as a server without disaggregation does."""
    if not is_local(req):
        return original(self, req=req)
    from sglang.srt.disaggregation.utils import DisaggregationMode

    mode, self.disaggregation_mode = self.disaggregation_mode, DisaggregationMode.NULL
    try:
        return original(self, req=req)
    finally:
        self.disaggregation_mode = mode
