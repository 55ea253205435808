"""What a fake worker reports of itself: its model, its engine, its health and its load."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import KW_ONLY, dataclass, field

from ppd.contract import DESCRIPTION_VERSION

MODEL = "fake"
PAGE_SIZE = 16
IDLE_TOKENS = 100_000_000  # room for all streams of a bench
_CAPACITY_TOKENS = 10_000


@dataclass(slots=True, eq=False)
class WorkerState:
    """The state of one worker, which may change at any time.

    Attributes:
        role: SGLang's ``disaggregation_mode``.
        adapters: names of the LoRA adapters that it serves.
        port: the port that it listens on; 0 before it listens.
        local_prefill: whether the plugin for local turns is installed.
        description_version: the version of the plugin's description.
        ready: whether ``/ready``, ``/health`` and ``/flush_cache`` succeed.
        boot_id: changes with each restart.
        dp_size: ranks of data parallelism.
        tp_size: of tensor parallelism.
        gpu: the driver's name of its GPU; "": none.
        link_gbps: of its link; None: unknown.
        free_tokens: of the KV cache; None: ``/v1/loads`` answers 404.
        free_of_ranks: of some ranks, where that is another number.
        load_written_at: the engine's timestamp of the load.
        loads_fail: whether ``/v1/loads`` closes the connection.
        probes_hang: whether health probes are never answered.
        probed: set by a health probe that is never answered.
        load_requested: set by each request for the load.
    """

    role: str
    _: KW_ONLY
    model: str = MODEL
    adapters: tuple[str, ...] = ()
    port: int = 0
    max_model_len: int = 32768
    vocab_size: int = 4096
    local_prefill: bool = True
    description_version: object = DESCRIPTION_VERSION
    ready: bool = True
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kv_token_bytes: int | None = None
    kv_events: dict[str, object] | None = None
    special_tokens: tuple[str, ...] = ()
    keeps_sessions: bool = False
    dp_size: int = 1
    tp_size: int = 1
    gpu: str = ""
    link_gbps: float | None = None
    free_tokens: int | None = None
    free_of_ranks: dict[int, int] = field(default_factory=dict)
    running: int = 0
    load_written_at: float = 0.0
    loads_fail: bool = False
    probes_hang: bool = False
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    load_requested: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> object:
        """Return the answer of ``/v1/models``."""
        cards = [
            {
                "id": name,
                "object": "model",
                "owned_by": "sglang",
                "max_model_len": self.max_model_len,
            }
            for name in (self.model, *self.adapters)
        ]
        return {"object": "list", "data": cards}

    def loads(self) -> list[dict[str, object]] | None:
        """Return the load of each rank as ``/v1/loads`` reports it; None if it is not reported."""
        if self.free_tokens is None:
            return None
        free = [self.free_of_ranks.get(rank, self.free_tokens) for rank in range(self.dp_size)]
        return [
            {
                "dp_rank": rank,
                "max_total_num_tokens": (capacity := max(_CAPACITY_TOKENS, tokens)),
                "num_total_tokens": capacity - tokens,
                "num_running_reqs": self.running,
                "timestamp": self.load_written_at,
            }
            for rank, tokens in enumerate(free)
        ]

    def server_info(self) -> object:
        """Return the answer of ``/server_info`` and of its older names."""
        plugin: dict[str, object] = {
            "version": self.description_version,
            "local_prefill": True,
            "boot_id": self.boot_id,
            "vocab_size": self.vocab_size,
            "special_tokens": self.special_tokens,
            "gpu": self.gpu,
            "link_gbps": self.link_gbps,
        }
        if self.kv_token_bytes is not None:
            plugin["kv_token_bytes"] = self.kv_token_bytes
        return {
            "model_path": self.model,
            "served_model_name": self.model,
            "tokenizer_path": self.model,
            "is_generation": True,
            "disaggregation_mode": self.role,
            "disaggregation_bootstrap_port": self.port,
            "page_size": PAGE_SIZE,
            "version": "0.5.21",
            "kv_events": self.kv_events,
            "enable_session_radix_cache": self.keeps_sessions,
            "dp_size": self.dp_size,
            "tp_size": self.tp_size,
            "internal_states": [{"ppd": plugin} if self.local_prefill else {}],
        }

    async def next_load_request(self) -> None:
        """Wait for the next request for the load."""
        self.load_requested.clear()
        await self.load_requested.wait()

    async def load_is_known(self) -> None:
        """Wait until the router has read the present load."""
        await self.next_load_request()
        await self.next_load_request()  # The router requests it again only when it has read it.
