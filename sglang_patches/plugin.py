"""The plugin of one scheduler: its parts, put together, and what they tell together."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from ppd import __version__
from ppd.contract import Role
from ppd.marks import unusual
from ppd.pacing import Pacer
from sglang_patches.local_queue import LocalQueue
from sglang_patches.local_step import LocalStep
from sglang_patches.settings import Settings
from sglang_patches.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Plugin:
    """What hangs on a scheduler as ``scheduler.ppd``.

    Attributes:
        boot_id: names this process: a router tells a restart from a pause by it.
        special_tokens: of the model, those of which a router would not think by itself.
    """

    scheduler: Any
    queue: LocalQueue
    step: LocalStep
    telemetry: Telemetry
    boot_id: str
    special_tokens: tuple[str, ...]

    @property
    def takes_appends(self) -> bool:
        return bool(self.scheduler.disaggregation_mode.value == Role.DECODE)

    @property
    def running(self) -> int:
        """Requests that decode; those in a mixed batch are not in the running one meanwhile."""
        scheduler = self.scheduler
        last = scheduler.last_batch
        mixed = (last.decoding_reqs or ()) if last and last.forward_mode.is_extend() else ()
        return len(scheduler.running_batch.reqs) + sum(not req.finished() for req in mixed)

    @property
    def kv_token_bytes(self) -> int | None:
        """Of one token's KV, as a transfer brings it to all ranks of this decode server.

        What is registered for transfers (``KVArgs.kv_item_lens``: bytes of a page in each buffer of
        this rank), not a formula: that would have to know every attention there is. None where it
        is not told: no decode server, or layers spread over pipeline stages.
        """
        scheduler, args = self.scheduler, self.scheduler.server_args
        if not self.takes_appends or args.pp_size > 1:
            return None
        registered = scheduler.disagg_decode_prealloc_queue.kv_manager.kv_args
        ranks = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
        return int(sum(registered.kv_item_lens) // registered.page_size * ranks)

    def state(self) -> dict[str, Any]:
        """For ``/server_info`` and the heartbeat; ``docs/REFERENCE.md`` says what stands here."""
        scheduler, pacer = self.scheduler, self.step.pacer
        used, _share = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        return {
            "version": __version__,
            "local_prefill": self.takes_appends,
            "vocab_size": scheduler.model_config.vocab_size,
            "boot_id": self.boot_id,
            "flushes": self.queue.flushes,
            "running": self.running,
            "waiting": len(self.queue.requests),
            "append_tokens": self.queue.append_tokens(),
            "prefilling": 0 if scheduler.chunked_req is None else 1,
            "kv_used_tokens": used,
            "kv_total_tokens": scheduler.max_total_num_tokens,
            "kv_token_bytes": self.kv_token_bytes,
            "special_tokens": self.special_tokens,
            "decode_step_ms": None if pacer.decode_ms is None else round(pacer.decode_ms, 3),
            **self.telemetry.state(),
        }


def attach(scheduler: Any, settings: Settings) -> Plugin:
    """Give ``scheduler`` its plugin."""
    metrics = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    telemetry = Telemetry(None if metrics is None else metrics.labels)
    queue = LocalQueue(scheduler, settings.max_append_tokens, telemetry)
    pacer = Pacer(
        full_chunk=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        page_size=scheduler.page_size,
        mixed=scheduler.is_mixed_chunk,
        target_ms=settings.tpot_target_ms,
        fixed_chunk=settings.append_chunk,
    )
    plugin = Plugin(
        scheduler,
        queue,
        LocalStep(scheduler, queue, pacer, telemetry),
        telemetry,
        uuid.uuid4().hex,
        _special_tokens(scheduler.tokenizer),
    )
    scheduler.ppd = plugin
    # PrefillAdder knows the cache but not the scheduler.
    scheduler.tree_cache.ppd = plugin
    if plugin.takes_appends:
        # /v1/loads counts the local queue as waiting, too.
        scheduler.load_inquirer = replace(
            scheduler.load_inquirer,
            get_waiting_queue=lambda: [*scheduler.waiting_queue, *queue.requests],
        )
    return plugin


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """None are known of a server without tokenizer, or with one that is not Hugging Face's."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return unusual(token.content for token in added.values() if token.special)
