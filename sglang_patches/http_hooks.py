"""The hooks on SGLang's HTTP process: they start the heartbeat and end it."""

from __future__ import annotations

import os
from typing import Any

from sglang_patches.engines import SUPPORTED
from sglang_patches.heartbeat import Address, Heartbeat
from sglang_patches.settings import read_settings
from sglang_patches.targets import Hook, source_link


def init_tokenizer_manager(
    _result: None, self: Any, server_args: Any, *_args: Any, **_kwargs: Any
) -> None:
    """Start the heartbeat if the settings name routers and the server has a role in PD."""
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
    """Announce to the routers that the server leaves, when it begins to drain."""
    if (heartbeat := self.tokenizer_manager.ppd_heartbeat) is not None:
        heartbeat.leave()


HTTP_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        parameters="self, server_args, port_args, *, start_pd_bootstrap_service",
        kind="after",
        function=init_tokenizer_manager,
        reason="start the heartbeat to the routers of PPD_ROUTERS",
        read_against=SUPPORTED,
        upstream=source_link("managers/tokenizer_manager.py", 480),
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler",
        parameters="self, signum, frame",
        kind="after",
        function=sigterm_handler,
        reason="announce to these routers that the worker leaves when the server begins to drain",
        read_against=SUPPORTED,
        upstream=source_link("managers/tokenizer_manager.py", 3838),
    ),
)
