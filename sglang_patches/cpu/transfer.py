"""Patches for SGLang's KV transfer on a CPU: its Mooncake sender over TCP, and its checksum.

* With the overlap scheduler, a prefill server that holds a longer prefix than its decode peer
  creates a ``torch.cuda.Event`` on any device (disaggregation/prefill.py:1319). A CPU forward is
  over when it returns, so there is nothing to wait for. ``torch.cpu.Event`` waits for nothing.
* 0.5.23's prefill server copies page indices through pinned memory (disaggregation/prefill.py:
  1746) if the sender supports that, on any device. 0.5.21 has no such sender.
* A TCP lane of Mooncake rejects blocks that would make its queue longer than 1,024. Upstream can
  bound the *indices* of a call. The number of blocks is a multiple of that by the model's buffers,
  and less where blocks are contiguous. Here the blocks themselves are bounded.
* The checksum of ``--disaggregation-enable-kv-checksum`` is a CUDA kernel. Here it is zlib's.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_BLOCKS = 512  # in a call; several rooms may be sent at a time


def install() -> None:
    """Patch the sender and the checksum in this process.

    Raises:
        AttributeError: SGLang has moved ``_transfer_data`` or ``compute``.
    """
    import torch
    from sglang.srt.disaggregation.checksum import KvChecksumComputer
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
    getattr(KvChecksumComputer, "compute")  # noqa: B009 (it must exist)
    KvChecksumComputer.compute = _checksum


def _checksum(self: Any, pages: torch.Tensor, states: torch.Tensor | None = None) -> int:
    """The checksum of pages of KV, and of states, in all buffers of this rank.

    Shapes: pages [pages]; states [states].
    """
    buffers = [(pages, self._kv_data_ptrs, self._kv_item_lens)]
    if states is not None:
        buffers.append((states, self._state_data_ptrs, self._state_item_lens))
    digest = 1
    for indices, pointers, sizes in buffers:
        for pointer, size in zip(pointers, sizes, strict=True):
            for index in indices.tolist():
                digest = zlib.adler32(ctypes.string_at(pointer + index * size, size), digest)
    return digest
