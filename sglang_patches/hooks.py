"""The list of hooks on SGLang, each with its target, its reason and its source upstream."""

from __future__ import annotations

import logging
import os
from typing import Any

from ppd import __version__
from ppd.errors import ConfigError
from sglang_patches.engines import SUPPORTED, engine, installed
from sglang_patches.http_hooks import HTTP_HOOKS
from sglang_patches.limits import check_flags, check_properties
from sglang_patches.plugin import attach
from sglang_patches.request_field import FIELD_HOOKS
from sglang_patches.scheduler_hooks import (
    abort_request,
    accept_output,
    active_req_count,
    add_request_to_queue,
    allocatable_token_budgets,
    can_schedule_lora_req,
    flush_cache,
    get_internal_state,
    get_next_disagg_decode_batch_to_run,
    handle_generate_request,
    hold_rebootstrap,
    init_prefill_adder,
    is_decode,
    is_fully_idle,
    pause_generation,
    poll_timeout_aborts,
    process_decode_queue,
)
from sglang_patches.settings import read_settings
from sglang_patches.targets import Hook, check_applied, source_link

logger = logging.getLogger("ppd.engine")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def init_scheduler(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Attach the plugin to a new scheduler, or end the process.

    Raises:
        SystemExit: a hook was not applied, or a flag of the decode server is not supported.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        check_applied(HOOKS)
        if is_decode(self):
            resolved = resolved_view(self.server_args)
            check_flags(resolved, installed().read_as, engine().speculative_algorithms)
            check_properties(self, resolved)
    except ConfigError as error:
        raise SystemExit(f"sglang-ppd: {error}") from error
    settings = read_settings(os.environ)
    assert settings is not None, "no hook is in a process where the plugin is off"
    plugin = attach(self, settings)
    if plugin.takes_appends:
        logger.info("sglang-ppd %s: this decode server takes local append-prefills", __version__)


HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_SCHEDULER}.__init__",
        parameters="self, server_args, port_args",
        kind="after",
        function=init_scheduler,
        reason="give the scheduler its local queue; stop if a hook was not applied",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 454),
    ),
    Hook(
        target=f"{_SCHEDULER}.handle_generate_request",
        parameters="self, recv_req, *, mm_input_error",
        kind="around",
        function=handle_generate_request,
        reason="a marked request passes the inline check for a bootstrap room (scheduler.py:2836)",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 2749),
    ),
    Hook(
        target=f"{_SCHEDULER}._add_request_to_queue",
        parameters="self, req, is_retracted",
        kind="around",
        function=add_request_to_queue,
        reason="local requests wait in their own queue, after the precondition",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 3266),
    ),
    Hook(
        target=f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run",
        parameters="self, running_batch",
        kind="around",
        function=get_next_disagg_decode_batch_to_run,
        reason="upstream's decode loop never prefills (decode.py:2991)",
        read_against=SUPPORTED,
        upstream=source_link("disaggregation/decode.py", 2991),
    ),
    Hook(
        target=f"{_SCHEDULER}.process_decode_queue",
        parameters="self",
        kind="around",
        function=process_decode_queue,
        reason="upstream takes up no transfer while a retracted request waits for room "
        "(decode.py:3186); if transfers hold that room and nothing runs, it waits for ever; "
        "nor does upstream ever restore a request that leaves less than the reserve of the "
        "whole pool (decode.py:585)",
        read_against=SUPPORTED,
        upstream=source_link("disaggregation/decode.py", 3172),
    ),
    Hook(
        target=f"{_SCHEDULER}.can_schedule_lora_req",
        parameters="self, req, running_loras",
        kind="around",
        function=can_schedule_lora_req,
        reason="prefill counts no adapters of transfers (scheduler.py:3957), and transfers count "
        "none of local prefills (decode.py:1328); together they exceed the slots",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 4163),
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        parameters="self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, "
        "new_token_ratio, rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens, "
        "priority_scheduling_preemption_threshold, max_prefill_bs, max_running_requests, "
        "prefill_max_requests, prefill_delayer_single_pass, dllm_config, "
        "waiting_queue_len, prefill_tile_block_m",
        kind="after",
        function=init_prefill_adder,
        reason="keep KV for the decoding of requests still in transfer",
        read_against=SUPPORTED,
        upstream=source_link("managers/schedule_policy.py", 622),
    ),
    Hook(
        target=f"{_PREALLOC}._active_req_count",
        parameters="self, extra_reserved_reqs",
        kind="around",
        function=active_req_count,
        reason="local prefills in flight will decode too",
        read_against=SUPPORTED,
        upstream=source_link("disaggregation/decode.py", 1868),
    ),
    Hook(
        target=f"{_PREALLOC}._allocatable_token_budgets",
        parameters="self, retractable_tokens, count_retracted, extra_reserved_reqs, "
        "reserved_tokens, hicache_reserved_tokens",
        kind="after",
        function=allocatable_token_budgets,
        reason="keep KV for the rest of a request in mid-prefill",
        read_against=SUPPORTED,
        upstream=source_link("disaggregation/decode.py", 1906),
    ),
    Hook(
        target=f"{_PREALLOC}.hold_rebootstrap",
        parameters="self, req",
        kind="around",
        function=hold_rebootstrap,
        reason="a paused local request is recomputed here, not by a prefill worker",
        read_against=SUPPORTED,
        upstream=source_link("disaggregation/decode.py", 848),
    ),
    Hook(
        target=f"{_SCHEDULER}.pause_generation",
        parameters="self, recv_req",
        kind="after",
        function=pause_generation,
        reason="a pause is no decode step, and no gap that a chunk has caused",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 5589),
    ),
    Hook(
        target=f"{_SCHEDULER}.abort_request",
        parameters="self, recv_req",
        kind="around",
        function=abort_request,
        reason="abort requests that wait in the local queue",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 5447),
    ),
    Hook(
        target=f"{_SCHEDULER}._poll_timeout_aborts",
        parameters="self",
        kind="around",
        function=poll_timeout_aborts,
        reason="SGLANG_REQ_WAITING_TIMEOUT holds for requests in the local queue too",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 3379),
    ),
    Hook(
        target=f"{_SCHEDULER}.is_fully_idle",
        parameters="self, for_health_check, ignore_waiting",
        kind="after",
        function=is_fully_idle,
        reason="a waiting local request is work; so are pages of an aborted transfer that the "
        "prefill server may still write to: 0.5.21 lets flush_cache free them twice and dies",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 5011),
    ),
    Hook(
        target=f"{_SCHEDULER}.flush_cache",
        parameters="self, empty_cache",
        kind="after",
        function=flush_cache,
        reason="routers drop their record of what this worker held at once, instead of one refused "
        "turn per conversation",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 5187),
    ),
    Hook(
        target=f"{_SCHEDULER}.get_internal_state",
        parameters="self, recv_req",
        kind="after",
        function=get_internal_state,
        reason="the worker describes itself in /server_info for the router's handshake",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler.py", 5218),
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.output_streamer"
        "._GenerationStreamAccumulator.accept",
        parameters="self, *, req",
        kind="around",
        function=accept_output,
        reason="a local request has input logprobs, which upstream takes from the prefill server",
        read_against=SUPPORTED,
        upstream=source_link("managers/scheduler_components/output_streamer.py", 417),
    ),
    *HTTP_HOOKS,
    *FIELD_HOOKS,
)
