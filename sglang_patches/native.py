"""For an SGLang that takes local prefills itself (draft PR sgl-project/sglang#34773).

Such an engine has a request field ``do_local_prefill``. Then none of our scheduling hooks is
applied: a marked request is given that field, and the server goes on telling routers what it
is. The precondition ``min_cached_tokens`` is not the engine's: it is not checked there.
"""

from __future__ import annotations

import uuid
from typing import Any

from ppd import __version__
from ppd.contract import LOCAL_MARKER, Role, is_marked
from sglang_patches.http_hooks import HTTP_HOOKS
from sglang_patches.targets import Hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def engine_takes_local_prefills() -> bool:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    kinds = TokenizedGenerateReqInput.__mro__
    return any(LOCAL_MARKER in vars(kind).get("__annotations__", {}) for kind in kinds)


def init_scheduler(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    self.ppd_boot_id = uuid.uuid4().hex


def handle_generate_request(
    original: Any, self: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    if is_marked(recv_req.sampling_params.custom_params):
        setattr(recv_req, LOCAL_MARKER, True)
    return original(self, recv_req, *args, **kwargs)


def get_internal_state(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> Any:
    used, _share = self.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    result.internal_state["ppd"] = {
        "version": __version__,
        "local_prefill": self.disaggregation_mode.value == Role.DECODE,
        "native": True,
        "vocab_size": self.model_config.vocab_size,
        "boot_id": self.ppd_boot_id,
        "running": len(self.running_batch.reqs),
        "waiting": 0,
        "append_tokens": 0,
        "kv_used_tokens": used,
        "kv_total_tokens": self.max_total_num_tokens,
        "decode_step_ms": None,
    }
    return result


# Any parameters will do: they are passed on as they come.
HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SCHEDULER}.__init__", None, "after", init_scheduler, "a name for this process"),
    Hook(
        f"{_SCHEDULER}.handle_generate_request",
        None,
        "around",
        handle_generate_request,
        "the wire contract's marker becomes the engine's own field",
    ),
    Hook(
        f"{_SCHEDULER}.get_internal_state",
        None,
        "after",
        get_internal_state,
        "the router's handshake",
    ),
    *HTTP_HOOKS,
)
