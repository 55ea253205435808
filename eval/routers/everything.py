"""Our router with all of its parts switched on, for what they cost together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..cluster import free_port

KEY = "sk-bench"  # of the router's one tenant; other routers ignore it

_ENOUGH = 1e12  # a limit that is counted against, and never reached


def config(folder: Path, traces: str) -> Path:
    """A configuration file in ``folder``.

    Args:
        traces: URL that takes spans.
    """
    file = folder / "everything.toml"
    file.write_text(f"""
admin_port = {free_port()}
admin_token = "operators"
log_format = "json"
decision_log = "{folder / "everything.decisions.jsonl"}"
otlp_endpoint = "{traces}"
trace_share = 0.01
resume_streams = 2
decode_fallback = true
corrections = [
    "interpolation", "stale_prefix", "load", "reservation", "noise", "shrinkage",
]
rate = {{ requests_per_minute = {_ENOUGH}, tokens_per_minute = {_ENOUGH} }}

[admission]
max_in_flight = 100000

[tenants.bench]
keys = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
rate = {{ requests_per_minute = {_ENOUGH}, tokens_per_minute = {_ENOUGH} }}
weights = {{ ttft = 1, tpot = 2 }}
""")
    return file
