"""The routers that ours is compared with, installed in an environment of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..cluster import Launcher, Process, environment, free_port

VERSIONS = {"smg": "1.13.0", "sglang-router": "0.3.2"}
NAMES = ("smg", "sglang_router", "mini_lb")


def install(where: Path) -> Path:
    """Install the other routers into an environment, and return its ``bin`` folder."""
    return environment(where, [f"{name}=={version}" for name, version in VERSIONS.items()])


def start(
    launch: Launcher,
    binaries: Path,
    name: str,
    prefill: str,
    decode: Sequence[str],
    core: int | None = None,
) -> Process:
    """One of ``NAMES``, still starting. Round robin, no limit on concurrency."""
    port = free_port()
    return launch.start(name, port, [*_argv(binaries, name, port, prefill, decode)], core)


def _argv(
    binaries: Path, name: str, port: int, prefill: str, decode: Sequence[str]
) -> Sequence[str]:
    python = [str(binaries / "python"), "-m", "sglang_router.launch_router"]
    command = [str(binaries / "smg"), "launch"] if name == "smg" else python
    argv = [
        *command,
        "--pd-disaggregation",
        *("--prefill", prefill, "8998"),
        *(word for url in decode for word in ("--decode", url)),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    if name == "mini_lb":
        return [*argv, "--mini-lb"]
    return [
        *argv,
        *("--policy", "round_robin", "--worker-startup-check-interval", "1"),
        *("--prometheus-port", str(free_port()), "--max-concurrent-requests", "-1"),
        *("--log-level", "warn"),
    ]
