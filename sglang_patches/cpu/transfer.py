"""Patches for SGLang's KV transfer on a CPU: its Mooncake sender over TCP, and its checksum.

* With the overlap scheduler, a prefill server that holds a longer prefix than its decode peer
  creates a ``torch.cuda.Event`` on any device (disaggregation/prefill.py:1319). A CPU forward is
  over when it returns, so there is nothing to wait for. ``torch.cpu.Event`` waits for nothing.
* 0.5.23's prefill server copies page indices through pinned memory (disaggregation/prefill.py:
  1746) if the sender supports that, on any device. 0.5.21 has no such sender.
* A TCP lane of Mooncake rejects blocks that would make its queue longer than 1,024. Upstream can
  bound the *indices* of a call. The number of blocks is a multiple of that by the model's buffers,
  and less where blocks are contiguous. Servers of different TP send one block for each token and
  buffer (mooncake/conn.py:1756), from several threads. Here the blocks of all calls are bounded.
* The checksum of ``--disaggregation-enable-kv-checksum`` is a CUDA kernel. Here it is zlib's.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_BLOCKS = 512  # under way at a time

Addresses = Sequence[int]


def install() -> None:
    """Patch the sender and the checksum in this process.

    Raises:
        AttributeError: SGLang has moved ``batch_transfer_sync`` or ``compute``.
    """
    import torch
    from sglang.srt.disaggregation.checksum import KvChecksumComputer
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )

    setattr(torch.cuda, "Event", torch.cpu.Event)  # noqa: B010 (mypy: it is a type)
    MooncakeKVSender.supports_host_tensor_indices = False
    transfer, turn = MooncakeTransferEngine.batch_transfer_sync, threading.Lock()

    def transfer_in_parts(
        self: Any, session_id: str, sources: Addresses, targets: Addresses, lengths: Addresses
    ) -> int:
        for begin in range(0, len(sources), _MAX_BLOCKS):
            part = slice(begin, begin + _MAX_BLOCKS)
            with turn:
                failed: int = transfer(
                    self, session_id, sources[part], targets[part], lengths[part]
                )
            if failed:
                return failed
        return 0

    MooncakeTransferEngine.batch_transfer_sync = transfer_in_parts
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
