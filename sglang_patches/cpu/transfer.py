"""Where SGLang 0.5.23 needs help to send KV from a CPU.

Its prefill server copies page indices through pinned memory and waits on a CUDA event
(disaggregation/prefill.py:1746) if the sender takes them so, whatever the device. 0.5.21
knows no such sender, and does not look.
"""

from __future__ import annotations


def install() -> None:
    """Patch Mooncake's sender in this process."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
