"""Where SGLang's Mooncake sender needs help on a CPU, whose transfers go over TCP.

* With the overlap scheduler a prefill server that holds a longer prefix than its decode peer
  makes a ``torch.cuda.Event`` on whichever device (disaggregation/prefill.py:1319). A CPU
  forward is over when it returns: an event has nothing to wait for, which is what
  ``torch.cpu.Event`` does.
* 0.5.23's prefill server copies page indices through pinned memory (disaggregation/prefill.py:
  1746) if the sender takes them so, whatever the device; 0.5.21 knows no such sender.
* A TCP lane of Mooncake rejects what would make its queue longer than 1,024 blocks. Upstream can
  bound the *indices* of a call, whose blocks are a multiple by the model's buffers, and fewer
  where they are contiguous; here the blocks themselves are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAX_BLOCKS = 512  # a call; several rooms may be sent at a time


def install() -> None:
    """Patch the sending side in this process.

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
