"""A decode server stands still for ever: a retracted request has no room, a transfer holds it.

``process_decode_queue`` takes up no transfer while a retracted request waits for room. Here two
requests decode in a pool of 750 tokens. The KV of a third one, of 300 tokens, is on its way. Those
two fill the pool, and one of them is retracted. The other one ends. Then the transfer ends too.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import decode_step, hold_transfer, report, request, with_scheduler

_POOL, _RESERVED = 750, 128
_TRANSFERRED, _DECODING = 300, 25  # tokens of the prompts
_STEPS = 500  # in which a server that can go on serves all three


def reproduce(scheduler: Any) -> None:
    """Fill the pool until a request is retracted, then let the transfer end."""
    prealloc, transfers = (
        scheduler.disagg_decode_prealloc_queue,
        scheduler.disagg_decode_transfer_queue,
    )
    for rid in ("a", "b"):
        scheduler.handle_generate_request(request(rid, [20] * _DECODING, 290))
    while len(scheduler.running_batch.reqs) < 2:
        decode_step(scheduler)
    ids = [10 + i % 70 for i in range(_TRANSFERRED)]
    scheduler.handle_generate_request(request("transferred", ids, 10))
    end_transfer = hold_transfer(scheduler, "transferred")
    while decode_step(scheduler):
        pass
    assert len(prealloc.retracted_queue) == len(transfers.queue) == 1
    end_transfer()
    steps = sum(decode_step(scheduler) for _ in range(_STEPS))
    report(
        steps_after_the_transfer=steps,
        retracted=len(prealloc.retracted_queue),
        in_transfer=len(transfers.queue),
    )


def main() -> None:
    """Run the reproduction."""
    flags = ("--max-total-tokens", str(_POOL), "--num-reserved-decode-tokens", str(_RESERVED))
    with_scheduler(reproduce, *flags, "--disaggregation-decode-retraction-backup", "cpu_tensor")


if __name__ == "__main__":
    main()
