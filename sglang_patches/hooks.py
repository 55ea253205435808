"""The hooks on SGLang, each with its target and its reason.

Every function here is thin: read engine state, call the scheduler's ``Plugin``, write back.
Signatures are those of SGLang's hook registry: an *around* hook gets the original first,
an *after* hook gets the result first. A server that is no decode server, or a request
that is not local, takes the original path.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ppd import __version__
from ppd.contract import is_marked
from ppd.errors import ConfigError
from sglang_patches.http_hooks import HTTP_HOOKS
from sglang_patches.limits import check_flags
from sglang_patches.local_queue import LOCAL_ROOM, is_local
from sglang_patches.plugin import Plugin, attach
from sglang_patches.settings import read_settings
from sglang_patches.targets import Hook, check_applied

logger = logging.getLogger("ppd.engine")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def _is_decode(scheduler: Any) -> bool:
    return bool(scheduler.disaggregation_mode.value == "decode")


def init_scheduler(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    try:
        check_applied(HOOKS)
        if _is_decode(self):
            check_flags(self.server_args)
            if self.require_mlp_sync:
                raise ConfigError("steps synchronized over ranks are not supported")
    except ConfigError as error:
        raise SystemExit(f"sglang-ppd: {error}") from error
    settings = read_settings(os.environ)
    assert settings is not None, "no hook is in a process where the plugin is off"
    plugin = attach(self, settings)
    if plugin.takes_appends:
        logger.info("sglang-ppd %s: this decode server takes local append-prefills", __version__)


def handle_generate_request(
    original: Any, self: Any, recv_req: Any, *, mm_input_error: Any = None
) -> Any:
    if _is_decode(self):
        room = recv_req.bootstrap_room
        if room is not None and room < 0:
            room = None  # only we give such rooms; upstream refuses a request without one
        if room is None and is_marked(recv_req.sampling_params.custom_params):
            room = LOCAL_ROOM
        recv_req.bootstrap_room = room
    return original(self, recv_req, mm_input_error=mm_input_error)


def add_request_to_queue(original: Any, self: Any, req: Any, is_retracted: bool = False) -> Any:
    if not (_is_decode(self) and is_local(req)):
        return original(self, req, is_retracted=is_retracted)
    if is_retracted:
        if req.output_ids and not self.ppd.step.is_being_written(req):
            # Backed up with its KV like a transferred request: upstream restores it.
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
        set_schedule_time_batch(batch)
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
    step.give_way(running_batch)
    with step.chunk_set_aside():
        return original(scheduler, running_batch=running_batch)


def process_decode_queue(original: Any, self: Any) -> None:
    original(self)
    queue, transfers = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
    if not queue.retracted_queue or not self.running_batch.is_empty() or self.waiting_queue:
        return
    self.waiting_queue.extend(transfers.pop_transferred())
    if not self.waiting_queue and not transfers.queue:
        self.waiting_queue.extend(_restore_alone(queue))


def _restore_alone(queue: Any) -> Any:
    """The first retracted request, with no more room for its decoding than there is."""
    reserved, queue.num_reserved_decode_tokens = queue.num_reserved_decode_tokens, 0
    try:
        return queue.resume_retracted_reqs([queue.retracted_queue[0].rid])
    finally:
        queue.num_reserved_decode_tokens = reserved


def init_prefill_adder(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    plugin: Plugin | None = getattr(self.tree_cache, "ppd", None)
    if plugin is not None and plugin.takes_appends:
        self.memory_budget.total_offset += sum(
            self._get_running_request_total_token_offset(req)
            for req in plugin.step.about_to_decode()
        )


def active_req_count(original: Any, self: Any, extra_reserved_reqs: int = 0) -> int:
    return int(original(self, extra_reserved_reqs)) + len(self.scheduler.ppd.step.launched())


def allocatable_token_budgets(result: int, self: Any, *_args: Any, **_kwargs: Any) -> int:
    return result - int(self.scheduler.ppd.queue.chunk_rest_tokens())


def hold_rebootstrap(original: Any, self: Any, req: Any) -> Any:
    if not is_local(req):
        return original(self, req)
    # No prefill worker knows this request. Undo what pause_generation (scheduler.py:5652)
    # prepared for a transfer, and prefill all of its tokens here again on resume.
    if req.pd_rebootstrap_forced_output_id is not None:
        req.output_ids.append(req.pd_rebootstrap_forced_output_id)
        req.pd_rebootstrap_forced_output_id = None
    req.pd_rebootstrap_in_progress = False
    self.scheduler.ppd.queue.requeue(req)
    return None


def pause_generation(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    self.ppd.step.interrupted()


def abort_request(original: Any, self: Any, recv_req: Any) -> Any:
    self.ppd.queue.abort(recv_req.rid, recv_req.abort_all, recv_req.finished_reason)
    return original(self, recv_req)


def is_fully_idle(
    result: bool, self: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    if not (result and _is_decode(self)):
        return result
    transfers = self.disagg_decode_transfer_queue
    if self._engine_paused:  # a paused loop does not come by where upstream resolves them
        transfers.resolve_deferred_releases()
    if transfers.has_pending_deferred_releases():
        return False
    return ignore_waiting or not self.ppd.queue.requests


def flush_cache(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> Any:
    self.ppd.queue.flushes += bool(result)  # False: it was refused, for something runs
    return result


def get_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    result.internal_state["ppd"] = self.ppd.state()
    return result


def poll_timeout_aborts(original: Any, self: Any) -> Any:
    received = self.waiting_queue
    self.waiting_queue = [*received, *self.ppd.queue.requests]
    try:
        return original(self)
    finally:
        self.waiting_queue = received


def accept_output(original: Any, self: Any, *, req: Any) -> Any:
    if not is_local(req):
        return original(self, req=req)
    from sglang.srt.disaggregation.utils import DisaggregationMode

    mode, self.disaggregation_mode = self.disaggregation_mode, DisaggregationMode.NULL
    try:
        return original(self, req=req)
    finally:
        self.disaggregation_mode = mode


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SCHEDULER}.__init__",
        "self, server_args, port_args",
        "after",
        init_scheduler,
        "give the scheduler its local queue; stop if a hook was not applied",
    ),
    Hook(
        f"{_SCHEDULER}.handle_generate_request",
        "self, recv_req, *, mm_input_error",
        "around",
        handle_generate_request,
        "a marked request passes the inline check for a bootstrap room (scheduler.py:2836)",
    ),
    Hook(
        f"{_SCHEDULER}._add_request_to_queue",
        "self, req, is_retracted",
        "around",
        add_request_to_queue,
        "local requests wait in their own queue, after the precondition",
    ),
    Hook(
        f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run",
        "self, running_batch",
        "around",
        get_next_disagg_decode_batch_to_run,
        "upstream's decode loop never prefills (decode.py:2991)",
    ),
    Hook(
        f"{_SCHEDULER}.process_decode_queue",
        "self",
        "around",
        process_decode_queue,
        "upstream looks at no transfer while a retracted request waits for room (decode.py:3186); "
        "if transfers hold that room and nothing runs, that is for good; nor does it restore one "
        "that leaves less than the reserve of the whole pool, ever (decode.py:585)",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, "
        "new_token_ratio, rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens, "
        "priority_scheduling_preemption_threshold, max_prefill_bs, max_running_requests, "
        "prefill_max_requests, prefill_delayer_single_pass, dllm_config, "
        "waiting_queue_len, prefill_tile_block_m",
        "after",
        init_prefill_adder,
        "keep KV for the decoding of requests still in transfer",
    ),
    Hook(
        f"{_PREALLOC}._active_req_count",
        "self, extra_reserved_reqs",
        "around",
        active_req_count,
        "local prefills in flight will decode too",
    ),
    Hook(
        f"{_PREALLOC}._allocatable_token_budgets",
        "self, retractable_tokens, count_retracted, extra_reserved_reqs, "
        "reserved_tokens, hicache_reserved_tokens",
        "after",
        allocatable_token_budgets,
        "keep KV for the rest of a request in mid-prefill",
    ),
    Hook(
        f"{_PREALLOC}.hold_rebootstrap",
        "self, req",
        "around",
        hold_rebootstrap,
        "a paused local request is recomputed here, not by a prefill worker",
    ),
    Hook(
        f"{_SCHEDULER}.pause_generation",
        "self, recv_req",
        "after",
        pause_generation,
        "a pause is no decode step, and no gap that a chunk has caused",
    ),
    Hook(
        f"{_SCHEDULER}.abort_request",
        "self, recv_req",
        "around",
        abort_request,
        "abort requests that wait in the local queue",
    ),
    Hook(
        f"{_SCHEDULER}._poll_timeout_aborts",
        "self",
        "around",
        poll_timeout_aborts,
        "SGLANG_REQ_WAITING_TIMEOUT holds for requests in the local queue too",
    ),
    Hook(
        f"{_SCHEDULER}.is_fully_idle",
        "self, for_health_check, ignore_waiting",
        "after",
        is_fully_idle,
        "a waiting local request is work; and so are pages of an aborted transfer that the "
        "prefill server may still write to: 0.5.21 lets flush_cache free them twice and dies",
    ),
    Hook(
        f"{_SCHEDULER}.flush_cache",
        "self, empty_cache",
        "after",
        flush_cache,
        "routers shall forget what this worker held, not find it out conversation by conversation",
    ),
    Hook(
        f"{_SCHEDULER}.get_internal_state",
        "self, recv_req",
        "after",
        get_internal_state,
        "state and counters in /server_info; the router's handshake",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer"
        "._GenerationStreamAccumulator.accept",
        "self, *, req",
        "around",
        accept_output,
        "a local request has input logprobs, which upstream takes from the prefill server",
    ),
    *HTTP_HOOKS,
)
