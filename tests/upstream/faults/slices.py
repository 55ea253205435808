"""Mooncake over TCP rejects the KV of a long prompt between servers of different TP.

``send_kvcache_slice`` sends one block for each token and buffer. A TCP lane of Mooncake takes
1,024 of them. Here two ranks' worth of heads, of 2,500 tokens, go from one engine to another.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from tests.upstream.in_process import report

_LAYERS, _TOKENS, _HEAD_BYTES = 4, 2500, 128


def send() -> tuple[int, bool]:
    """Send from rank 0 of two to a server of one rank.

    Returns:
        The result of SGLang's call, and whether the slices arrived.
    """
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )

    buffers = 2 * _LAYERS  # keys and values
    random = np.random.default_rng(0)
    sources = random.integers(0, 255, (buffers, _TOKENS, _HEAD_BYTES), np.uint8)
    targets = np.zeros((buffers, _TOKENS, 2 * _HEAD_BYTES), np.uint8)
    engines = [MooncakeTransferEngine("127.0.0.1", 0, None) for _ in range(2)]
    for engine, memory in zip(engines, (sources, targets), strict=True):
        engine.batch_register([part.ctypes.data for part in memory], [p.nbytes for p in memory])
    manager = MooncakeKVManager.__new__(MooncakeKVManager)
    manager.engine, manager.attn_tp_size, manager.pp_size = engines[0], 2, 1
    manager.is_mla_backend = False
    manager.kv_args = SimpleNamespace(
        kv_item_lens=[_HEAD_BYTES] * buffers,
        kv_data_ptrs=[part.ctypes.data for part in sources],
        kv_layer_ids=[],
        page_size=1,
        total_kv_head_num=2,
        kv_head_num=1,
        engine_rank=0,
        prefill_start_layer=0,
    )
    tokens = np.arange(_TOKENS, dtype=np.int32)
    with ThreadPoolExecutor(4) as executor:
        result = manager.send_kvcache_slice(
            engines[1].get_session_id(),
            tokens,
            [part.ctypes.data for part in targets],
            tokens,
            dst_tp_rank=0,
            dst_attn_tp_size=1,
            dst_kv_item_len=2 * _HEAD_BYTES,
            executor=executor,
        )
    return result, bool((targets[:, :, :_HEAD_BYTES] == sources).all())


def main() -> None:
    """Run the reproduction, without and with the bound of ``sglang_patches.cpu.transfer``."""
    from sglang_patches.cpu import transfer

    result, arrived = send()
    transfer.install()
    bounded, bounded_arrived = send()
    report(
        failed=bool(result),
        arrived=arrived,
        bounded_failed=bool(bounded),
        bounded_arrived=bounded_arrived,
    )
