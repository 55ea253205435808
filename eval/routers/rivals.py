"""The routers that ours is compared with, installed in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cluster import Launcher, Process, free_port

VERSIONS = {"smg": "1.13.0", "sglang-router": "0.3.2"}
NAMES = ("smg", "sglang_router", "mini_lb")


def install(where: Path) -> Path:
    """The environment's ``bin`` folder; made if it is not there."""
    done = where / "installed"
    if not done.exists():
        print(f"first run: installing rivals into {where}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
        subprocess.run([where / "bin/pip", "install", "--quiet", *wanted], check=True)
        done.touch()
    return where / "bin"


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
