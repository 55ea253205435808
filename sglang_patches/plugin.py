"""The plugin of one scheduler: its parts, and the description they make together."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, replace
from typing import Any

import psutil

from ppd import __version__
from ppd.contract import DESCRIPTION_VERSION, Role, WorkerDescription
from ppd.marks import unusual
from ppd.pacing import Pacer
from sglang_patches.hardware import Hardware, hardware_of
from sglang_patches.local_queue import LocalQueue
from sglang_patches.local_step import LocalStep
from sglang_patches.settings import Settings
from sglang_patches.telemetry import Telemetry

# With EAGLE the radix cache's keys are pairs of tokens (mem_cache/radix_cache.py:60), and a reply's
# last tokens are not in it yet: a later turn finds one to three tokens fewer.
_BIGRAM_SLACK = 3


@dataclass(frozen=True, slots=True)
class Plugin:
    """The parts of the plugin, attached to a scheduler as ``scheduler.ppd``.

    Attributes:
        unroomed: whether requests without a bootstrap room are prefilled here.
        boot_id: random name of the server's process, by which a router recognises a restart.
        dp_rank: of data parallelism; None without it.
        special_tokens: the model's special tokens of unusual form (``ppd.marks.unusual``).
        hardware: what the server runs on.
    """

    scheduler: Any
    queue: LocalQueue
    step: LocalStep
    telemetry: Telemetry
    unroomed: bool
    boot_id: str
    dp_rank: int | None
    special_tokens: tuple[str, ...]
    hardware: Hardware

    @property
    def takes_appends(self) -> bool:
        """Whether the server takes local append-prefills, as every decode server does."""
        return bool(self.scheduler.disaggregation_mode.value == Role.DECODE)

    @property
    def speculates(self) -> bool:
        """Whether the server decodes speculatively."""
        return self.scheduler.server_args.speculative_algorithm is not None

    def can_be_restored(self, req: Any) -> bool:
        """Whether upstream can restore a retracted local request from a backup of its KV.

        Such a backup is that of a transferred request. It has no hidden states for the draft model
        (speculative/eagle_disaggregation.py:49 ends the process then), and no KV that a forward
        may still be writing.
        """
        return bool(req.output_ids and not self.speculates and not self.step.is_being_written(req))

    @property
    def running(self) -> int:
        """The number of requests that decode.

        Requests in a mixed batch are not in the running batch meanwhile.
        """
        scheduler = self.scheduler
        last = scheduler.last_batch
        mixed = (last.decoding_reqs or ()) if last and last.forward_mode.is_extend() else ()
        return len(scheduler.running_batch.reqs) + sum(not req.finished() for req in mixed)

    @property
    def kv_token_bytes(self) -> int | None:
        """Bytes of one token's KV in a transfer, over all ranks that hold a part of it.

        Taken from the buffers that are registered for transfers (``KVArgs.kv_item_lens``: bytes of
        a page in each buffer of this rank): a formula would need a case for every attention.
        None for a server that is no decode server, or whose layers are spread over pipeline stages.
        """
        scheduler, args = self.scheduler, self.scheduler.server_args
        if not self.takes_appends or args.pp_size > 1:
            return None
        registered = scheduler.disagg_decode_prealloc_queue.kv_manager.kv_args
        from sglang.srt.runtime_context import get_parallel

        ranks = get_parallel().attn_tp_size  # those of data parallelism hold other requests' KV
        return int(sum(registered.kv_item_lens) // registered.page_size * ranks)

    def description(self) -> WorkerDescription:
        """The worker's description for ``/server_info`` and the heartbeat."""
        scheduler, pacer = self.scheduler, self.step.pacer
        used, _share = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        return WorkerDescription(
            version=DESCRIPTION_VERSION,
            plugin_version=__version__,
            boot_id=self.boot_id,
            dp_rank=self.dp_rank or 0,
            local_prefill=self.takes_appends,
            vocab_size=scheduler.model_config.vocab_size,
            flushes=self.queue.flushes,
            kv_token_bytes=self.kv_token_bytes,
            cache_slack_tokens=_BIGRAM_SLACK if self.speculates else 0,
            special_tokens=self.special_tokens,
            gpu=self.hardware.gpu,
            link_gbps=self.hardware.link_gbps,
            running=self.running,
            waiting=len(self.queue.requests),
            append_tokens=self.queue.append_tokens(),
            kv_used_tokens=used,
            kv_total_tokens=scheduler.max_total_num_tokens,
            decode_step_ms=None if pacer.decode_ms is None else round(pacer.decode_ms, 3),
            prefilling=0 if scheduler.chunked_req is None else 1,
            **self.telemetry.counters(),
        )


def attach(scheduler: Any, settings: Settings) -> Plugin:
    """Build the plugin of ``scheduler`` and attach it."""
    from sglang.srt.runtime_context import get_parallel

    metrics = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    telemetry = Telemetry(None if metrics is None else metrics.labels)
    queue = LocalQueue(scheduler, settings.max_append_tokens, telemetry)
    pacer = Pacer(
        full_chunk=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        page_size=scheduler.page_size,
        mixed=scheduler.is_mixed_chunk,
        speculative=scheduler.server_args.speculative_algorithm is not None,
        target_ms=settings.tpot_target_ms,
        fixed_chunk=settings.append_chunk,
    )
    dp_rank = get_parallel().dp_rank
    plugin = Plugin(
        scheduler,
        queue,
        LocalStep(scheduler, queue, pacer, telemetry),
        telemetry,
        settings.unroomed,
        new_boot_id(dp_rank),
        dp_rank,
        _special_tokens(scheduler.tokenizer),
        hardware_of(scheduler, settings),
    )
    scheduler.ppd = plugin
    # PrefillAdder has a reference to the cache but none to the scheduler.
    scheduler.tree_cache.ppd = plugin
    if plugin.takes_appends:
        # /v1/loads counts the requests of the local queue as waiting, too.
        scheduler.load_inquirer = replace(
            scheduler.load_inquirer,
            get_waiting_queue=lambda: [*scheduler.waiting_queue, *queue.requests],
        )
    return plugin


def new_boot_id(dp_rank: int | None) -> str:
    """Return a random name of this process; one for all ranks of data parallelism of a server.

    A server's controller process starts its ranks on this host, and is started with the server.

    Args:
        dp_rank: the rank of this process; None without data parallelism.
    """
    if dp_rank is None:
        return uuid.uuid4().hex
    controller = psutil.Process(os.getppid())
    name = f"{socket.gethostname()} {controller.pid} {controller.create_time()}"
    return uuid.uuid5(uuid.NAMESPACE_OID, name).hex


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The special tokens of unusual form; none without a tokenizer of Hugging Face's kind."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return unusual(token.content for token in added.values() if token.special)
