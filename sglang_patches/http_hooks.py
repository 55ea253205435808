"""The hooks on SGLang's HTTP process: they begin and end the heartbeat."""

from __future__ import annotations

import os
from typing import Any

from sglang_patches.heartbeat import Address, Heartbeat
from sglang_patches.settings import read_settings
from sglang_patches.targets import Hook


def init_tokenizer_manager(
    _result: None, self: Any, server_args: Any, *_args: Any, **_kwargs: Any
) -> None:
    settings = read_settings(os.environ)
    assert settings is not None, "no hook is in a process where the plugin is off"
    self.ppd_heartbeat = None
    if settings.routers and server_args.disaggregation_mode != "null":
        address = Address(
            server_args.host,
            server_args.port,
            "https" if server_args.ssl_certfile else "http",
            settings.advertise_url,
        )
        self.ppd_heartbeat = Heartbeat(
            address, settings.routers, settings.worker_token, server_args.api_key
        )
        self.ppd_heartbeat.start()


def sigterm_handler(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    if (heartbeat := self.tokenizer_manager.ppd_heartbeat) is not None:
        heartbeat.leave()


HTTP_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        "self, server_args, port_args, *, start_pd_bootstrap_service",
        "after",
        init_tokenizer_manager,
        "start the heartbeat to the routers of PPD_ROUTERS",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler",
        "self, signum, frame",
        "after",
        sigterm_handler,
        "say goodbye to them when the server begins to drain",
    ),
)
