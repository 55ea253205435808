"""Patches for SGLang's Mooncake sender on a CPU, whose transfers go over TCP.

* With the overlap scheduler, a prefill server that holds a longer prefix than its decode peer
  creates a ``torch.cuda.Event`` on any device (disaggregation/prefill.py:1319). A CPU forward is
  over when it returns, so there is nothing to wait for. ``torch.cpu.Event`` waits for nothing.
* 0.5.23's prefill server copies page indices through pinned memory (disaggregation/prefill.py:
  1746) if the sender supports that, on any device. 0.5.21 has no such sender.
* A TCP lane of Mooncake rejects blocks that would make its queue longer than 1,024. Upstream can
  bound the *indices* of a call. The number of blocks is a multiple of that by the model's buffers,
  and less where blocks are contiguous. Here the blocks themselves are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAX_BLOCKS = 512  # in a call; several rooms may be sent at a time


def install() -> None:
    """Patch the sender in this process.

    Raises:
        AttributeError: SGLang has moved ``_transfer_data``.
    """
    import torch
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVSender

    setattr(torch.cuda, "Event", torch.cpu.Event)  # noqa: B010 (mypy: it is a type)
    MooncakeKVSender.supports_host_tensor_indices = False
    send = MooncakeKVManager._transfer_data

    def send_in_slices(self: Any, mooncake_session_id: str, blocks: Sequence[Any]) -> int:
        for begin in range(0, len(blocks), _MAX_BLOCKS):
            failed: int = send(self, mooncake_session_id, blocks[begin : begin + _MAX_BLOCKS])
            if failed:
                return failed
        return 0

    MooncakeKVManager._transfer_data = send_in_slices
