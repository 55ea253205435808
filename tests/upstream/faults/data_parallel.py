"""Plain data parallelism on a prefill server: a rank refuses the transfers that are its own.

With ``--dp-size 2`` and no DP attention, SGLang sends a request to rank ``room % 2``. The rank
compares that with its rank of DP attention, which is 0 on both.
"""

from __future__ import annotations

import os
from typing import Any

from tests.upstream.in_process import report, request, with_scheduler


def reproduce(scheduler: Any) -> None:
    """Send rank 1 a request of a room that is its own, and one of a room that is not."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    queue = scheduler.disagg_prefill_bootstrap_queue
    refused = []
    for room in (3, 2):
        sent = request(
            str(room), list(range(10, 40)), 4, bootstrap_host="127.0.0.1", bootstrap_room=room
        )
        scheduler.handle_generate_request(sent)
        status = queue.kv_manager.check_status(room)
        if status == KVPoll.Failed:
            refused.append(room)
    report(rank=1, refused=refused)


def main() -> None:
    """Run the reproduction."""
    from sglang.srt.utils.network import get_free_port

    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # else each rank needs a NUMA node

    port = str(get_free_port())
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake")
    with_scheduler(
        reproduce,
        *flags,
        "--disaggregation-bootstrap-port",
        port,
        "--dp-size",
        "2",
        decode=False,
        dp_rank=1,
    )
