"""What a worker says of itself to routers, every few seconds and when it leaves.

An announcement is a hint: the router shakes hands with the worker before it sends it work.
Fields that the other side does not know are skipped, so that workers and routers can be
upgraded one by one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ppd.contract import Role
from ppd.errors import ContractError

PATH = "/workers"
INTERVAL_S = 3.0

_Count = Annotated[int, msgspec.Meta(ge=0)]


class WorkerLoad(msgspec.Struct, frozen=True):
    """Attributes:
    running: requests that decode.
    waiting: local requests that wait; ``append_tokens``: their uncached tokens, with the rest
        of the one in mid-prefill.
    kv_used_tokens: of ``kv_total_tokens``; what could be evicted counts as free.
    decode_step_ms: of a decode step without prefill, moving average; None before the first.
    """

    running: _Count = 0
    waiting: _Count = 0
    append_tokens: _Count = 0
    kv_used_tokens: _Count = 0
    kv_total_tokens: _Count = 0
    decode_step_ms: float | None = None


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    url: where routers reach the worker.
    boot_id: names its process.
    versions: of ``sglang`` and ``sglang-ppd``.
    capabilities: ``local_prefill`` is the one there is.
    flushes: how often the process has flushed its whole KV cache; None if it does not tell.
    leaving: it takes no more work.
    """

    url: str
    role: Role
    boot_id: str
    models: tuple[str, ...] = ()
    bootstrap_port: _Count = 0
    page_size: _Count = 1
    versions: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    load: WorkerLoad = WorkerLoad()
    flushes: _Count | None = None
    leaving: bool = False


def parse(data: bytes) -> Announcement:
    """Raises:
    ContractError: it is no announcement; the message names the field.
    """
    try:
        return msgspec.json.decode(data, type=Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"no announcement: {error}") from error
