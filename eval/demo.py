"""``ppd-eval demo``: five turns of a chat through prefill worker, decode worker and router.

It prints what the engine itself reports. Then it repeats the conversation on one monolithic server:
the token ids must be the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppd.contract import Role

from . import tiny_model
from .cluster import gpu_flags, launching, wait_all
from .options import Commands, cluster_options
from .provenance import provenance
from .raw_rows import append_whole

DOCUMENT = """\
Field notes, tide station on the north mole. The gauge was cleaned on Monday and has drifted
twice since: four millimetres low after the storm of the ninth, two high after the barge
struck the fender on the fourteenth. Both times the drift went back within a day. The spare
float is cracked and must not be used. Readings are taken at 06:00, 12:00, 18:00 and 24:00,
local time without summer time, and sent to the harbour office before the next one is due. If
the line is down, write them in the green book and send them together; do not estimate missing
ones. The lowest water this month was 31 centimetres on the third, the highest 412 on the
ninth at 18:00, with wind from the north-west at force nine. The lamp on the mole head burns
steadily again since the cable was replaced. Visitors may enter the hut with the keeper only.
The key hangs in the office, not under the stone. Coal for the stove lasts until the end of
the month if the door is kept shut. Please order: one float, two litres of lamp oil, a ream of
chart paper, and batteries of the flat kind. The gull with the bent wing is called Anton and
is not to be fed."""

TURNS = (
    f"Please read these notes. When was the water highest?\n\n{DOCUMENT}",
    "And when was it lowest?",
    "Which things have to be ordered?",
    "What should I do with readings if the line is down?",
    "Thank you. Who is Anton?",
)


@dataclass(slots=True)
class Transcript:
    """The results of one pass through the conversation, a list entry for each turn."""

    routes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)


def converse(url: str, turns: Sequence[str], max_tokens: int, *, show: bool) -> Transcript:
    """Hold the conversation through the ``openai`` client, streaming, greedy."""
    import openai

    seen = Transcript()
    messages: list[dict[str, str]] = []
    context = 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client:
        model = client.models.list().data[0].id
        for number, text in enumerate(turns, 1):
            messages.append({"role": "user", "content": text})
            reply = _one_turn(client, model, messages, max_tokens)
            messages.append({"role": "assistant", "content": reply.text})
            seen.routes.append(reply.headers.get("x-ppd-route", "-"))
            seen.reasons.append(reply.headers.get("x-ppd-reason", "-"))
            seen.context_tokens.append(context)
            seen.new_tokens.append(reply.prompt_tokens - context)
            seen.cached_tokens.append(reply.cached_tokens)
            seen.ttft_ms.append(round(reply.ttft_ms, 1))
            seen.output_ids.append(reply.ids)
            context = reply.prompt_tokens + len(reply.ids)
            if show:
                _print_row(number, seen)
    return seen


@dataclass(slots=True)
class _Reply:
    headers: Any
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0


def _one_turn(client: Any, model: str, messages: list[dict[str, str]], max_tokens: int) -> _Reply:
    sent_s = time.perf_counter()
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_output_ids_in_sglext": True},
    ) as response:
        reply = _Reply(response.headers)
        for chunk in response.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                reply.ttft_ms = reply.ttft_ms or 1e3 * (time.perf_counter() - sent_s)
                reply.text += chunk.choices[0].delta.content
            if extension := getattr(chunk, "sglext", None):
                reply.ids = (extension.get("output_ids") or [[]])[0]
            if chunk.usage:
                reply.prompt_tokens = chunk.usage.prompt_tokens
                details = chunk.usage.prompt_tokens_details
                reply.cached_tokens = (details and details.cached_tokens) or 0
    return reply


_HEADER = ("turn", "route", "reason", "context", "new", "cached", "TTFT ms")
_ROW = "{:>4}  {:<7} {:<14} {:>8} {:>6} {:>7} {:>9}"


def _print_row(number: int, seen: Transcript) -> None:
    columns = (seen.routes, seen.reasons, seen.context_tokens, seen.new_tokens, seen.cached_tokens)
    ttft = f"{seen.ttft_ms[-1]:.1f}"
    print(_ROW.format(number, *(column[-1] for column in columns), ttft), flush=True)


def add_to(commands: Commands) -> None:
    """Declare ``demo``."""
    parser = commands.add_parser(
        "demo",
        parents=[cluster_options()],
        help="five turns, compared",
        description=(
            "Hold a chat of five turns on a prefill worker, a decode worker and a router. "
            "Then hold it on one server and compare the token ids."
        ),
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each reply")
    parser.add_argument("--record", type=Path, help="append the result to this JSONL file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Hold the conversation on both, and print what each turn did.

    The last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a route or a token differs from what is expected.
    """
    model, max_tokens, logs, record = (
        options.model,
        options.max_tokens,
        options.logs,
        options.record,
    )
    path = tiny_model.resolve(model)
    print(f"model: {path}" + ("" if model else " (random weights: its words mean nothing)"))
    print("starting a prefill worker, a decode worker, the router and a monolithic server ...")
    started_s = time.monotonic()
    with launching(logs) as launch:
        prefill = launch.worker(Role.PREFILL, path, *gpu_flags(0, 3))
        decode = launch.worker(Role.DECODE, path, *gpu_flags(1, 3))
        monolithic = launch.worker(Role.REPLICA, path, *gpu_flags(2, 3))
        wait_all([prefill, decode, monolithic])
        router = launch.router([prefill], [decode], "--policy", "full")
        wait_all([router])
        print(f"ready after {time.monotonic() - started_s:.0f} s; logs in {logs}\n")
        print(_ROW.format(*_HEADER))
        ours = converse(router.url, TURNS, max_tokens, show=True)
        alone = converse(monolithic.url, TURNS, max_tokens, show=False)
        identical = ours.output_ids == alone.output_ids
        print(f"\ntoken ids identical to the monolithic server's: {'yes' if identical else 'NO'}")
        print("stopping ...", flush=True)
    result = {
        "routes": ours.routes,
        "cached_tokens": ours.cached_tokens,
        "context_tokens": ours.context_tokens,
        "new_tokens": ours.new_tokens,
        "ttft_ms": ours.ttft_ms,
        "identical_to_monolithic": identical,
    }
    if record is not None:
        append_whole(record, [{**result, "model": Path(path).name, **provenance(0)}])
    print(json.dumps(result))
    expected = ["remote"] + ["local"] * (len(TURNS) - 1)
    # A model of the caller's choice may well run in bf16, where remote and monolithic differ.
    return 0 if ours.routes == expected and (identical or model is not None) else 1
