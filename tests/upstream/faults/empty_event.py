"""A stream begins with an event without a token: the request was retracted before its first one.

With overlap scheduling the next step is scheduled before the result of a prefill is processed. It
may retract a request of that prefill. Its token is dropped then, but the request is streamed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.upstream.in_process import report, request, with_scheduler


def reproduce(scheduler: Any) -> None:
    """Prefill two requests, and retract one of them in the step that follows."""
    events: list[tuple[str, int]] = []
    streamer = scheduler.output_streamer
    send = streamer.send_to_detokenizer.send_output

    def record(output: Any, *rest: Any) -> Any:
        events.extend(zip(output.rids, map(len, output.output_ids), strict=True))
        return send(output, *rest)

    streamer.send_to_detokenizer.send_output = record
    scheduler.result_queue = deque()
    for rid in ("a", "b"):
        scheduler.handle_generate_request(request(rid, list(range(10, 40)), 8))
    for _ in range(2):  # as event_loop_overlap: launch a step, then process the one before
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        result = scheduler.run_batch(batch)
        scheduler.result_queue.append((batch.copy(), result))
        if scheduler.last_batch:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = batch
    report(events=events)


def main() -> None:
    """Run the reproduction. SGLang's own test switch stands for a pool that is full."""
    from sglang.srt.managers import scheduler as module

    module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, 1
    with_scheduler(reproduce, decode=False, overlap=True)
