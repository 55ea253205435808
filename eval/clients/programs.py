"""Frameworks in environments of their own, and ``curl`` with an offer of HTTP/2."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ..cluster import environment, run_to_end
from .run import ClientRun, require

# Each requirement, and the program of ``frameworks`` that uses it.
FRAMEWORKS = {
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
    "langchain-openai": "langchain-openai==1.7.4",
    "instructor": "instructor==1.17.0",
}
_PROGRAMS = Path(__file__).with_name("frameworks")
_SCHEMA = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
_TOOL = {"type": "function", "function": {"name": "record", "parameters": _SCHEMA}}


def by_framework(run_of: ClientRun, name: str) -> dict[str, int]:
    """Run the program of a framework.

    Args:
        name: one of ``FRAMEWORKS``.

    Returns:
        The requests that it sent, by what they were for.
    """
    commands = environment(run_of.environments / name, [FRAMEWORKS[name]])
    program = _PROGRAMS / f"by_{name.replace('-', '_')}.py"
    log = run_of.folder / f"{name}.log"
    run_to_end([str(commands / "python"), str(program), run_of.url], log)
    cases: dict[str, int] = json.loads(log.read_text().splitlines()[-1])
    return cases


def by_curl(run_of: ClientRun) -> dict[str, int]:
    """Send requests that offer HTTP/2 by ``Upgrade: h2c``, as ``curl --http2`` does."""
    chat = {"model": "default", "messages": [{"role": "user", "content": "Is it wet?"}]}
    # Several calls would not end before the reply does, with this model.
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    named = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA}}
    bodies: dict[str, tuple[str, dict[str, object], str]] = {
        "chat": ("chat/completions", {**chat, "max_tokens": 16}, "chat.completion"),
        "stream": ("chat/completions", {**chat, "max_tokens": 16, "stream": True}, "[DONE]"),
        "tool": (
            "chat/completions",
            {**chat, "max_tokens": 64, "tools": [_TOOL], **one},
            '"tool_calls"',
        ),
        "object": (
            "chat/completions",
            {**chat, "max_tokens": 64, "response_format": named},
            "wet",
        ),
        "responses": (
            "responses",
            {"model": "default", "input": "Is it wet?", "max_output_tokens": 16},
            '"response"',
        ),
    }
    for case, (path, body, expected) in bodies.items():
        done = subprocess.run(
            [
                *("curl", "--http2", "--silent", "--show-error", "--fail-with-body"),
                *("--write-out", "\nHTTP/%{http_version}", "--json", json.dumps(body)),
                f"{run_of.url}/v1/{path}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        found = f"{done.stdout[-2000:]} {done.stderr}"
        require(done.returncode == 0, f"curl, {case}: {found}")
        require(done.stdout.endswith("HTTP/1.1"), f"curl, {case}: {found}")
        require(expected in done.stdout, f"curl, {case}: {found}")
    return dict.fromkeys(bodies, 1)
