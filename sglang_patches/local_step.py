"""The scheduling step of a decode server while it has local requests.

This module owns the order of work in a step and the KV that is reserved for other requests.
``ppd.pacing`` chooses the size of a chunk. ``local_queue.py`` owns the requests that wait.

Engine objects (scheduler, request, batch) are SGLang's and untyped here. Where their names differ
between versions, ``engines.py`` has both. Line numbers are 0.5.21's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ppd.pacing import Chunk, Pacer
from sglang_patches.engines import engine
from sglang_patches.local_queue import LocalQueue
from sglang_patches.step_times import StepTimes
from sglang_patches.telemetry import Telemetry


class LocalStep:
    """Schedules chunks of local prefill between and beside the steps of running decodes.

    Args:
        scheduler: SGLang's scheduler.
        queue: the local requests that wait.
        pacer: chooses the next chunk.
        telemetry: receives the times of chunks and decode gaps.

    Attributes:
        just_merged: requests whose prefill ran in the batch before the step that is scheduled now.
            With overlap scheduling, that batch may still run.
    """

    def __init__(
        self, scheduler: Any, queue: LocalQueue, pacer: Pacer, telemetry: Telemetry
    ) -> None:
        self._scheduler = scheduler
        self._queue = queue
        self.pacer = pacer
        # With overlap, a step is scheduled while the previous forward still runs. On a CPU it
        # never does, because forwards run in the scheduler's own thread. An emulated device
        # (eval/emulation) runs behind its host, as a GPU does.
        behind = scheduler.device != "cpu" or getattr(scheduler, "emulates_device", False)
        lag = int(scheduler.enable_overlap and behind)
        self._speculates = scheduler.server_args.speculative_algorithm is not None
        accepted = partial(engine().accepted, scheduler) if self._speculates else None
        self._times = StepTimes(queue, pacer, telemetry, lag, accepted)
        self.just_merged: tuple[Any, ...] = ()
        self._decode_steps_left = 0  # before the next chunk, while decodes wait
        self._locals_turn = True  # who had the last free row
        # With DP attention a chunk here lengthens the steps of the other ranks.
        self._peers_run = False
        # Upstream's waiting_queue while the local queue stands in its place.
        self._received: list[Any] | None = None

    # -- requests that the rest of the scheduler must count ------------------------------

    def launched(self) -> list[Any]:
        """The requests whose prefill is under way and which no upstream queue holds.

        Running decodes are among them if the last step mixed them in.
        """
        scheduler = self._scheduler
        chunked, last = scheduler.chunked_req, scheduler.last_batch
        launched = [] if chunked is None else [chunked]
        if last is not None and last.forward_mode.is_extend():
            launched += [r for r in last.reqs if r is not chunked and not r.finished()]
        return launched

    def is_being_written(self, req: Any) -> bool:
        """Whether the forward that writes this request's KV may still be running.

        With overlap scheduling, a backup taken now could miss that KV.
        """
        return any(r is req for r in self.just_merged)

    def about_to_decode(self) -> list[Any]:
        """The transferred requests that will decode soon and need KV to grow."""
        scheduler = self._scheduler
        received = scheduler.waiting_queue if self._received is None else self._received
        return [*received, *(r.req for r in scheduler.disagg_decode_transfer_queue.queue)]

    # -- the step -----------------------------------------------------------------------

    def begin(self) -> None:
        """Record that a step is about to be scheduled."""
        self._times.begin()

    def scheduled(self, batch: Any, running_batch: Any) -> None:
        """Record that ``batch`` runs now; None if no batch runs.

        With DP attention a rank without work runs an idle batch beside the others' steps.
        """
        self._peers_run = batch is not None and self._tokens_of_peers(batch) > 0
        if batch is None:
            self.interrupted()
            return
        if batch.forward_mode.is_extend():
            self._times.prefills(
                batch, running_batch, self._scheduler.chunked_req, peers_decode=self._peers_run
            )
            return
        if batch.is_extend_in_batch:
            self._times.peer_prefills(decoding=not batch.forward_mode.is_idle())
        else:
            self._times.decodes()
        self._decode_steps_left = max(0, self._decode_steps_left - 1)

    def _tokens_of_peers(self, batch: Any) -> int:
        """The tokens that other data-parallel ranks compute in this step."""
        if not self._scheduler.require_mlp_sync:
            return 0
        from sglang.srt.runtime_context import get_parallel

        tokens = batch.global_num_tokens  # of each rank
        return int(sum(tokens) - tokens[get_parallel().attn_dp_rank])

    def interrupted(self) -> None:
        """Record that no batch runs, for lack of work or because of a pause."""
        self._times.interrupted()
        self._decode_steps_left = 0

    def has_work(self) -> bool:
        """Whether there is a local request that waits, is in prefill, or was just prefilled."""
        scheduler = self._scheduler
        return bool(
            self._queue.requests
            or scheduler.chunked_req is not None
            or scheduler._pending_chunked_abort_req is not None
            or (scheduler.last_batch and scheduler.last_batch.forward_mode.is_extend())
        )

    def extend(self, running_batch: Any) -> tuple[Any, Any]:
        """Schedule the next local prefill batch, if one can run now.

        The order is that of ``Scheduler.get_next_batch_to_run`` (scheduler.py:3641):
        finish aborts, keep the last chunk's KV, merge the last extend, then prefill.

        Returns:
            (batch or None, running batch).
        """
        scheduler = self._scheduler
        if scheduler._pending_chunked_abort_req is scheduler.chunked_req is not None:
            self._queue.ended_early(scheduler.chunked_req)
        scheduler.process_pending_chunked_abort()
        running_batch = self._merge_last_extend(running_batch)
        own_wait = bool(not running_batch.is_empty() or scheduler.waiting_queue)
        decodes_wait = own_wait or self._peers_run
        if decodes_wait and self._decode_steps_left:
            return None, running_batch
        # While retracted requests wait for memory, only the request in mid-prefill goes on.
        short = bool(scheduler.disagg_decode_prealloc_queue.retracted_queue)
        admitted = 0 if short else self._rows_of_locals(running_batch)
        if scheduler.chunked_req is None and not admitted:
            return None, running_batch
        full = Chunk(self.pacer.full_chunk, 0, self.pacer.mixed)
        chunk = self._agreed(self._next_chunk(admitted > 0)) if decodes_wait else full
        mixed = len(running_batch.reqs) if chunk.mixed else 0
        if not self._fits(chunk.tokens, running_batch if mixed else None):
            return None, running_batch  # decodes free some by ending, or by being retracted
        if admitted:
            self._queue.refuse_evicted(chunk.tokens)
        running_batch.batch_is_full = False  # upstream's decode loop never clears it
        with self._prefill_scheduled_by_upstream(chunk.tokens + mixed, chunk.mixed, admitted):
            plan = scheduler.get_new_batch_prefill(running_batch)
        if plan.batch_to_run is not None:
            # A mixed batch has no request whose transfer ended since. Upstream does not mix a batch
            # with logprobs either: then all decodes wait for its end.
            joining = bool(scheduler.waiting_queue) and self._free_rows(running_batch) > 0
            left_out = own_wait and (joining or not plan.batch_to_run.decoding_reqs)
            interval = scheduler.prefill_decode_interval  # the operator's minimum
            steps = max(chunk.decode_steps, interval, left_out)
            self._decode_steps_left = steps if decodes_wait else 0
        return plan.batch_to_run, plan.running_batch

    def _next_chunk(self, admits: bool) -> Chunk:
        """Choose the next chunk of the request in mid-prefill, or of the first that waits.

        Args:
            admits: whether requests that wait may fill the chunk.
        """
        chunked = self._scheduler.chunked_req
        if chunked is not None:
            rest, context = self._queue.chunk_rest_tokens(), engine().extend_end(chunked)
        else:
            first = self._queue.requests[0]
            context = first.num_matched_prefix_tokens
            rest = len(first.origin_input_ids) + len(first.output_ids) - context
        behind = max(0, self._queue.append_tokens() - rest) if admits else 0
        return self.pacer.next_chunk(max(1, rest), context, behind)

    def _agreed(self, chunk: Chunk) -> Chunk:
        """Take the first rank's chunk on every rank that has the same requests.

        Each of them measures its own times, but all of them must run the same step. The ranks of
        data parallelism have other requests.
        """
        group = self._scheduler.dp_tp_group
        if group.world_size == 1:
            return chunk
        from sglang.srt.utils import broadcast_pyobj

        (first,) = broadcast_pyobj([chunk], group.rank, group.cpu_group, src=group.ranks[0])
        assert isinstance(first, Chunk)
        return first

    def _fits(self, tokens: int, decodes: Any) -> bool:
        """Whether KV is free for the next chunk and for the decodes in the same forward.

        The KV of a request in mid-prefill was free when it was admitted. Decode steps between its
        chunks take more than the share that admission expects of them. Upstream ends the process
        if the allocation of a chunk fails (mem_cache/allocation.py:169).

        Args:
            tokens: size of the chunk.
            decodes: the batch of the decodes, or None. With speculation each holds a reserve.
        """
        scheduler = self._scheduler
        if scheduler.chunked_req is not None:
            tokens = min(tokens, self._queue.chunk_rest_tokens())
        elif decodes is not None:
            tokens = min(tokens, self._queue.append_tokens())
        else:
            return True  # upstream's admission checks it
        needed = tokens + scheduler.page_size
        if decodes is not None:
            needed += decodes.new_tokens_required_next_decode()
        return bool(self._free_tokens() >= needed)

    def give_way(self, running_batch: Any) -> None:
        """Free the KV of the request in mid-prefill if decodes have no room for a step.

        The requests whose transfer has ended decode in that step, too. Upstream would retract
        decodes, and abort the last one. The KV that was computed stays in the radix cache until it
        is evicted; the request waits again, ahead of new ones.
        Where forwards overlap, the result of its last chunk is still to come. Upstream ignores it
        like that of any retracted request (batch_result_processor.py:337).
        """
        scheduler = self._scheduler
        chunked = scheduler.chunked_req
        if chunked is None or self._decodes_fit(running_batch):
            return
        from sglang.srt.managers.schedule_batch import release_req

        scheduler.chunked_req = None
        release_req(
            req=chunked,
            remaing_req_count=len(running_batch.reqs),
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )
        self._queue.requeue(chunked)

    def _decodes_fit(self, running_batch: Any) -> bool:
        """Whether KV is free for a step of the running decodes and of those about to join them."""
        scheduler = self._scheduler
        if not (running_batch.is_empty() or running_batch.check_decode_mem()):
            return False
        joining = scheduler.waiting_queue[: max(0, self._free_rows(running_batch))]
        needed = 0 if running_batch.is_empty() else running_batch.new_tokens_required_next_decode()
        needed += sum(map(self._first_step_tokens, joining))
        return not joining or bool(self._free_tokens() >= needed)

    def _first_step_tokens(self, req: Any) -> int:
        """The tokens of KV that a transferred request takes with its first decode step."""
        page_size = int(self._scheduler.page_size)
        if self._speculates:
            return math.ceil((1 + engine().decode_reserve()) / page_size) * page_size
        held = len(req.origin_input_ids) + len(req.output_ids) - 1
        return page_size if held % page_size == 0 else 0

    def _rows_of_locals(self, running_batch: Any) -> int:
        """How many local requests may join the batch now.

        Finished transfers wait for its rows, too. With too few for all, both take turns.
        """
        free, received = self._free_rows(running_batch), len(self._scheduler.waiting_queue)
        if not self._queue.requests or free <= 0:
            return 0
        if free > received:
            return free - received
        self._locals_turn = not self._locals_turn
        return int(self._locals_turn)

    def _free_rows(self, running_batch: Any) -> int:
        """How many requests may join the batch; one row is kept for that in mid-prefill."""
        scheduler = self._scheduler
        taken = len(running_batch.reqs) + (scheduler.chunked_req is not None)
        return int(scheduler.max_running_requests - taken)

    def _free_tokens(self) -> int:
        """The tokens of KV that are free or can be evicted."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        return int(free + scheduler.disagg_decode_prealloc_queue._radix_full_evictable())

    def _merge_last_extend(self, running_batch: Any) -> Any:
        scheduler = self._scheduler
        chunked, last = scheduler.chunked_req, scheduler.last_batch
        exclude = []
        self.just_merged = ()
        if chunked is not None:
            exclude.append(chunked)
            if engine().extend_end(chunked) > engine().prefix_len(chunked):
                scheduler.stash_chunked_request(chunked)
        if not (last and last.forward_mode.is_extend()):
            return running_batch
        if last.chunked_req is not None:
            exclude.append(last.chunked_req)
        engine().filter_batch(last, exclude)
        decoding = last.decoding_reqs or ()
        self.just_merged = tuple(r for r in last.reqs if not any(r is d for d in decoding))
        if last.is_empty():
            return running_batch
        if running_batch.is_empty():
            return last
        running_batch.merge_batch(last)
        return running_batch

    @contextmanager
    def _prefill_scheduled_by_upstream(
        self, chunk_tokens: int, mixed: bool, admitted: int
    ) -> Iterator[None]:
        """Point upstream's prefill scheduling at the local queue and the chosen chunk.

        Preemption is off meanwhile: it would requeue a running request as a new one.

        Args:
            chunk_tokens: tokens of the batch, with one of each mixed decode.
            mixed: whether decodes run in the same forward.
            admitted: how many requests of the local queue may join; where a policy orders them, all
                of them or none.
        """
        scheduler, queue = self._scheduler, self._queue
        preemption, chunk_size, is_mixed = (
            scheduler.enable_priority_preemption,
            scheduler.chunked_prefill_size,
            scheduler.is_mixed_chunk,
        )
        if admitted and not queue.in_order:
            admitted = len(queue.requests)
        self._received = scheduler.waiting_queue
        offered, kept = queue.requests[:admitted], queue.requests[admitted:]
        scheduler.waiting_queue, queue.requests = offered, kept
        scheduler.enable_priority_preemption = False
        scheduler.chunked_prefill_size = chunk_tokens
        scheduler.is_mixed_chunk = mixed
        try:
            yield
        finally:
            scheduler.is_mixed_chunk = is_mixed
            scheduler.chunked_prefill_size = chunk_size
            scheduler.enable_priority_preemption = preemption
            queue.requests = [*scheduler.waiting_queue, *queue.requests]
            scheduler.waiting_queue = self._received
            self._received = None

    @contextmanager
    def chunk_set_aside(self) -> Iterator[None]:
        """Hide the request in mid-prefill from upstream's decode step.

        Upstream asserts that there is no such request. One running slot is kept free for it.
        """
        scheduler = self._scheduler
        chunked = scheduler.chunked_req
        scheduler.chunked_req = None
        scheduler.max_running_requests -= chunked is not None
        try:
            yield
        finally:
            scheduler.chunked_req = chunked
            scheduler.max_running_requests += chunked is not None
