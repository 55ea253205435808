"""Hooks for an SGLang that takes local prefills itself (draft PR sgl-project/sglang#34773).

The requests of such an engine have a field ``do_local_prefill``. Then none of the scheduling hooks
is applied: a marked request gets that field, and the server still describes itself to routers.
The engine does not check the precondition ``min_cached_tokens``.
"""

from __future__ import annotations

import os
from typing import Any

from ppd import __version__
from ppd.contract import DESCRIPTION_VERSION, LOCAL_MARKER, Role, WorkerDescription, is_marked
from sglang_patches.hardware import hardware_of
from sglang_patches.http_hooks import HTTP_HOOKS
from sglang_patches.plugin import new_boot_id
from sglang_patches.settings import read_settings
from sglang_patches.targets import REPOSITORY, Hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_READ_AGAINST = ("draft PR #34773",)
_PULL_REQUEST = f"{REPOSITORY}/pull/34773"


def engine_takes_local_prefills() -> bool:
    """Whether the requests of the installed SGLang have the field ``do_local_prefill``."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    kinds = TokenizedGenerateReqInput.__mro__
    return any(LOCAL_MARKER in vars(kind).get("__annotations__", {}) for kind in kinds)


def init_scheduler(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Give the scheduler process its random name and its option."""
    from sglang.srt.runtime_context import get_parallel

    settings = read_settings(os.environ)
    assert settings is not None, "no hook is in a process where the plugin is off"
    self.ppd_dp_rank = get_parallel().dp_rank
    self.ppd_boot_id = new_boot_id(self.ppd_dp_rank)
    self.ppd_unroomed = settings.unroomed
    self.ppd_hardware = hardware_of(self, settings)


def handle_generate_request(
    original: Any, self: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Set the engine's own field on a marked request, and on one without a room if asked to."""
    is_decode = self.disaggregation_mode.value == Role.DECODE
    unroomed = is_decode and self.ppd_unroomed and recv_req.bootstrap_room is None
    if unroomed or is_marked(recv_req.sampling_params.custom_params):
        setattr(recv_req, LOCAL_MARKER, True)
    return original(self, recv_req, *args, **kwargs)


def get_internal_state(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Add the worker's description to the internal state."""
    used, _share = self.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    result.internal_state["ppd"] = WorkerDescription(
        version=DESCRIPTION_VERSION,
        plugin_version=__version__,
        boot_id=self.ppd_boot_id,
        dp_rank=self.ppd_dp_rank or 0,
        local_prefill=bool(self.disaggregation_mode.value == Role.DECODE),
        native=True,
        vocab_size=self.model_config.vocab_size,
        running=len(self.running_batch.reqs),
        kv_used_tokens=used,
        kv_total_tokens=self.max_total_num_tokens,
        gpu=self.ppd_hardware.gpu,
        link_gbps=self.ppd_hardware.link_gbps,
    ).to_json_object()
    return result


# The hooks pass on any parameters, so they do not check them.
HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_SCHEDULER}.__init__",
        parameters=None,
        kind="after",
        function=init_scheduler,
        reason="give the process a name by which routers recognise a restart",
        read_against=_READ_AGAINST,
        upstream=_PULL_REQUEST,
    ),
    Hook(
        target=f"{_SCHEDULER}.handle_generate_request",
        parameters=None,
        kind="around",
        function=handle_generate_request,
        reason="the wire contract's marker becomes the engine's own field",
        read_against=_READ_AGAINST,
        upstream=_PULL_REQUEST,
    ),
    Hook(
        target=f"{_SCHEDULER}.get_internal_state",
        parameters=None,
        kind="after",
        function=get_internal_state,
        reason="the worker describes itself in /server_info for the router's handshake",
        read_against=_READ_AGAINST,
        upstream=_PULL_REQUEST,
    ),
    *HTTP_HOOKS,
)
