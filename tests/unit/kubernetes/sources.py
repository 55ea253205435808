"""Flags and endpoints of the programs that the chart starts, read from their sources."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from .tools import ROOT


def sglang_flags() -> set[str]:
    """The flags of the installed SGLang, which has one for each field of its arguments."""
    folder = sglang_folder()
    files = [folder / "server_args.py", *(folder / "arg_groups").rglob("*.py")]
    fields = (re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE) for path in files)
    return {f"--{name.replace('_', '-')}" for found in fields for name in found}


def sglang_endpoints() -> set[str]:
    """The paths of the installed SGLang's server."""
    source = (sglang_folder() / "entrypoints/http_server.py").read_text()
    return set(re.findall(r'@app\.get\("(/\w+)"\)', source))


def sglang_folder() -> Path:
    """The installed SGLang."""
    found = find_spec("sglang")
    assert found is not None, "SGLang is not installed: make setup"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "srt"


def router_endpoints() -> set[str]:
    """The paths of the router."""
    described = (ROOT / "docs/reference/endpoints.md").read_text()
    return set(re.findall(r"`GET (/\w+)`", described))


def pool_endpoints() -> set[str]:
    """The paths of the pool."""
    source = (ROOT / "router/pool/server.py").read_text()
    return set(re.findall(r'web\.get\("(/\w+)"', source))
