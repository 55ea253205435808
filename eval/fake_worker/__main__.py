"""A fake worker as a process that may be killed at any time.

Run as ``python -m eval.fake_worker ROLE PORT MODEL``.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from .fault import FaultScript, fault_worker
from .kv import KvState

_PACE_S, _LATE_S = 0.002, 0.05


async def serve(role: str, port: int, model: str) -> None:
    """Serve until the process ends; transfers use the UDP port of the same number."""
    kv = KvState()
    await fault_worker(role, model, FaultScript(_LATE_S, _PACE_S, kv)).listen(port)
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: kv.transfers, ("127.0.0.1", port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
