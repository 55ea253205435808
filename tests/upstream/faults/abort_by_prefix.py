"""An abort ends every request whose id begins with the aborted one's."""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import decode_step, report, request, with_scheduler


def reproduce(scheduler: Any) -> None:
    """Abort request 1 while 1, 12 and 2 decode."""
    from sglang.srt.managers.io_struct import AbortReq

    for rid in ("1", "12", "2"):
        scheduler.handle_generate_request(request(rid, list(range(10, 40)), 50))
    while len(scheduler.running_batch.reqs) < 3:
        decode_step(scheduler)
    reqs = list(scheduler.running_batch.reqs)
    scheduler.abort_request(AbortReq(rid="1"))
    while decode_step(scheduler):
        pass
    ended = {req.rid: req.finished_reason.to_json()["type"] for req in reqs}
    report(aborted=sorted(rid for rid, reason in ended.items() if reason == "abort"))


def main() -> None:
    """Run the reproduction."""
    with_scheduler(reproduce)
