"""The checksum of transferred KV covers tokens that the decode server has decoded itself.

On a later turn the decode server holds a prefix with its own reply, and receives only what follows.
The decode kernels' values differ a little from those of a prefill. So a digest over the whole
prompt never agrees with the prefill server's.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import decode_step, report, request, with_scheduler

_PROMPT, _REPLY, _APPENDED = 40, 20, 10  # tokens


def _receive(scheduler: Any, sent: Any) -> None:
    scheduler.handle_generate_request(sent)
    for entry in scheduler.disagg_decode_prealloc_queue.queue:
        entry.req.skip_radix_cache_insert = False  # as for requests whose transfer is real


def reproduce(scheduler: Any) -> None:
    """Decode a reply, send it back in a later turn, and count the pages of that turn's digest."""
    prompt = list(range(10, 10 + _PROMPT))
    _receive(scheduler, request("first", prompt, _REPLY))
    while not scheduler.running_batch.reqs:
        decode_step(scheduler)
    (first,) = scheduler.running_batch.reqs
    while decode_step(scheduler):
        pass
    later = [*prompt, *first.output_ids, *range(10, 10 + _APPENDED)]
    pages: list[int] = []

    def record(indices: Any, *_states: Any) -> int:
        pages.append(len(indices))
        return 1

    scheduler.kv_checksum_computer.compute = record
    _receive(scheduler, request("later", later, 1))
    add = scheduler.disagg_decode_transfer_queue.pop_transferred

    def pop_transferred(*arguments: Any, **named: Any) -> Any:
        transferred = add(*arguments, **named)
        for req in transferred:
            req.expected_kv_checksum = 1  # a fake transfer brings none
        return transferred

    scheduler.disagg_decode_transfer_queue.pop_transferred = pop_transferred
    while not pages:
        decode_step(scheduler)
    report(prompt=len(later), decoded=len(first.output_ids), digested=pages[0])


def main() -> None:
    """Run the reproduction, with pages of one token."""
    with_scheduler(reproduce, "--disaggregation-enable-kv-checksum")
