"""A model of SGLang's scheduler, as far as the plugin's scheduling uses it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ppd.pacing import Pacer
from sglang_patches import local_step, scheduler_hooks, step_times
from sglang_patches.local_step import LocalStep

FULL, PACED = 512, 64  # tokens of a chunk when nothing decodes, and beside decodes


class Mode:
    def __init__(self, name: str) -> None:
        self._name = name

    def is_extend(self) -> bool:
        return self._name == "extend"

    def is_idle(self) -> bool:
        return self._name == "idle"


@dataclass(eq=False)
class Request:
    """A request of ``tokens`` new tokens, and of ``steps`` decode steps after them."""

    tokens: int
    steps: int
    prefix_len: int = 0
    extend_end: int = 0
    ppd_progress: None = None
    is_retracted: bool = False
    num_matched_prefix_tokens: int = 0
    output_ids: tuple[int, ...] = ()

    @property
    def origin_input_ids(self) -> range:
        return range(self.tokens)

    def finished(self) -> bool:
        return self.steps <= 0


@dataclass(eq=False)
class Batch:
    reqs: list[Request]
    forward_mode: Mode
    decoding_reqs: list[Request] | None = None
    chunked_req: Request | None = None
    global_num_tokens: list[int] = field(default_factory=list)
    is_extend_in_batch: bool = False

    @property
    def tokens(self) -> int:
        if not self.forward_mode.is_extend():
            return len(self.reqs)
        return self.reqs[0].extend_end - self.reqs[0].prefix_len + len(self.reqs) - 1

    def is_empty(self) -> bool:
        return not self.reqs

    def merge_batch(self, other: Batch) -> None:
        self.reqs += other.reqs

    def check_decode_mem(self) -> bool:
        return True

    def new_tokens_required_next_decode(self) -> int:
        return len(self.reqs)


class Engine:
    """Access to the model's requests and batches."""

    def prefix_len(self, req: Request) -> int:
        return req.prefix_len

    def extend_end(self, req: Request) -> int:
        return req.extend_end

    def decode_reserve(self) -> int:
        return 0

    def filter_batch(self, batch: Batch, exclude: list[Request]) -> None:
        batch.reqs = [r for r in batch.reqs if not r.finished() and r not in exclude]


class Rank:
    """A rank's scheduler, as far as the plugin sees it."""

    device, enable_overlap, require_mlp_sync, page_size = "cpu", False, True, 1
    prefill_decode_interval, max_running_requests = 0, 100
    enable_priority_preemption = False
    _pending_chunked_abort_req = None

    def __init__(self, number: int, mixed: bool) -> None:
        self.number = number
        self.is_mixed_chunk = mixed
        self.chunked_prefill_size = FULL
        self.server_args = SimpleNamespace(speculative_algorithm=None)
        self.dp_tp_group = SimpleNamespace(world_size=1)
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=self.synchronize)
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 10**6)
        self.disagg_decode_prealloc_queue = SimpleNamespace(
            retracted_queue=[], _radix_full_evictable=lambda: 0
        )
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=[])
        self.waiting_queue: list[Request] = []
        self.chunked_req: Request | None = None
        self.last_batch: Batch | None = None
        self.running = Batch([], Mode("decode"))
        self.offered: list[Batch | None] = []  # what it synchronized in this iteration
        queue: Any = SimpleNamespace(
            requests=[],
            in_order=True,
            chunk_rest_tokens=self._rest,
            append_tokens=lambda: 0,
            refuse_evicted=lambda _: None,
        )
        telemetry: Any = SimpleNamespace(
            chunk=lambda _: None, decode_gap=lambda _: None, load=lambda *_: None
        )
        pacer = Pacer(full_chunk=FULL, page_size=1, mixed=mixed, fixed_chunk=PACED)
        self.queue = queue
        self.ppd = SimpleNamespace(step=LocalStep(self, queue, pacer, telemetry))

    def _rest(self) -> int:
        return (
            0 if self.chunked_req is None else self.chunked_req.tokens - self.chunked_req.extend_end
        )

    def synchronize(self, batch: Batch | None) -> Batch | None:
        self.offered.append(batch)
        return batch

    def process_pending_chunked_abort(self) -> None:
        pass

    def stash_chunked_request(self, req: Request) -> None:
        req.prefix_len = req.extend_end

    def get_new_batch_prefill(self, running: Batch) -> Any:
        """As upstream does: the request in mid-prefill first, within the size of a chunk."""
        req = self.chunked_req or (self.waiting_queue.pop(0) if self.waiting_queue else None)
        if req is None:
            return SimpleNamespace(batch_to_run=None, running_batch=running)
        decoding = list(running.reqs) if self.is_mixed_chunk else []
        size = self.chunked_prefill_size - len(decoding)
        req.extend_end = min(req.tokens, req.prefix_len + size)
        self.chunked_req = req if req.extend_end < req.tokens else None
        batch = Batch([req, *decoding], Mode("extend"), decoding or None, self.chunked_req)
        rest = Batch([], Mode("decode")) if decoding else running
        return SimpleNamespace(batch_to_run=batch, running_batch=rest)

    def original(self, running_batch: Batch) -> Any:
        """Upstream's own step: decodes, and one synchronization."""
        assert self.chunked_req is None
        free = max(0, self.max_running_requests - len(running_batch.reqs))
        running_batch.reqs += self.waiting_queue[:free]
        self.waiting_queue = self.waiting_queue[free:]
        running_batch.reqs = [r for r in running_batch.reqs if not r.finished()]
        running_batch.forward_mode, running_batch.chunked_req = Mode("decode"), None
        running_batch.decoding_reqs = None
        batch = self.synchronize(running_batch if running_batch.reqs else None)
        return SimpleNamespace(batch_to_run=batch, running_batch=running_batch)

    def schedule(self) -> Batch | None:
        def original(scheduler: Rank, running_batch: Batch) -> Any:
            return scheduler.original(running_batch)

        self.offered.clear()
        self.ppd.step.begin()
        plan = scheduler_hooks._next_batch(original, self, self.running)
        self.running = plan.running_batch
        batch: Batch | None = plan.batch_to_run
        return batch


def patch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugin use the model of the engine in place of SGLang."""
    made: dict[str, Any] = {
        "sglang.srt.managers.schedule_batch": {"NextBatchPlan": SimpleNamespace},
        "sglang.srt.observability.req_time_stats": {"set_schedule_time_batch": lambda _: None},
        "sglang.srt.runtime_context": {"get_parallel": lambda: SimpleNamespace(attn_dp_rank=0)},
    }
    for name, members in made.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for module in (local_step, step_times):
        monkeypatch.setattr(module, "engine", Engine)
