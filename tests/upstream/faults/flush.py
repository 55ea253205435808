"""``flush_cache`` while a decode server still holds the pages of an aborted transfer.

The server keeps such pages until each prefill rank has acknowledged the abort, or a timeout has
passed. 0.5.21 does not count them as work. So it flushes, and releases the pages a second time
afterwards. 0.5.23 refuses the flush. But a paused server never looks at these pages again, and so
refuses until it continues.
"""

from __future__ import annotations

import logging
from typing import Any

from tests.upstream.in_process import decode_step, hold_transfer, report, request, with_scheduler


def _hold_aborted_transfer(scheduler: Any, rid: str) -> None:
    """Put a request where SGLang puts an aborted one: its pages held, no acknowledgement yet."""
    transfers = scheduler.disagg_decode_transfer_queue
    scheduler.handle_generate_request(request(rid, list(range(10, 60)), 4))
    hold_transfer(scheduler, rid)
    while not transfers.queue:
        decode_step(scheduler)
    (entry,) = transfers.queue
    transfers.queue = []
    # One prefill rank was notified of the abort. The timeout of its answer is over at once.
    entry.kv_receiver.abort_notified, entry.kv_receiver.bootstrap_infos = True, [{}]
    transfers.deferred_kv_release_timeout = 0.0
    transfers._defer_release(entry)


class _Errors(logging.Handler):
    """Keeps the types of logged exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.types: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record's exception."""
        if record.exc_info and record.exc_info[0]:
            self.types.append(record.exc_info[0].__name__)


def reproduce(scheduler: Any) -> None:
    """Flush a running server, then a paused one."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    errors = _Errors()
    logging.getLogger("sglang.srt.disaggregation.decode").addHandler(errors)
    _hold_aborted_transfer(scheduler, "running")
    flushed = scheduler.flush_cache()
    scheduler.disagg_decode_transfer_queue.resolve_deferred_releases()
    free = scheduler.token_to_kv_pool_allocator.available_size()
    running = {"flushed": flushed, "errors": errors.types, "free_tokens": free}
    if not flushed:
        _hold_aborted_transfer(scheduler, "paused")
        scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        # A paused event loop takes in commands, and does nothing else.
        running["flushed_while_paused"] = any(scheduler.flush_cache() for _ in range(10))
    report(**running)


def main() -> None:
    """Run the reproduction."""
    with_scheduler(reproduce, "--max-total-tokens", "750")
