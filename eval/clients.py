"""``ppd-eval traffic clients``: load clients of others, through the router, on real workers.

The ``openai`` and ``anthropic`` clients, SGLang's own ``sglang.benchmark.serving`` and NVIDIA's
AIPerf each hold conversations of several turns. What they count is compared with what the router
counts; none of them may see an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai

from ppd.contract import Role
from ppd.decision import Route
from ppd.outcome import Outcome

from . import tiny_model
from .cluster import ClientError, environment, launching, run_to_end, share_flags, wait_all
from .options import Commands, cluster_options
from .prometheus import read_metrics
from .provenance import provenance
from .raw_rows import append_whole

AIPERF = "aiperf==0.13.0"
_TURNS = 4
_CONVERSATIONS = 8
# SGLang's benchmark imports what a machine without GPU has stand-ins for.
_BENCHMARK = (
    "import runpy; from sglang_patches.cpu import stand_ins; import torch; "
    "torch.cuda.is_available() or stand_ins.install(); "
    "runpy.run_module('sglang.benchmark.serving', run_name='__main__')"
)


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What a client sends its requests to, and where it may write."""

    url: str
    model: str
    folder: Path
    aiperf: Path


def add_to(commands: Commands) -> None:
    """Declare ``traffic clients``."""
    parser = commands.add_parser(
        "clients",
        parents=[cluster_options()],
        help="load clients that others wrote",
        description=(
            "Send requests of `openai`, `anthropic`, `sglang.benchmark.serving` and AIPerf "
            "through the router to real workers. The last line is one JSON object."
        ),
    )
    parser.add_argument(
        "--aiperf",
        type=Path,
        default=Path(".run/aiperf"),
        help="the environment that AIPerf is installed in, on the first run",
    )
    parser.add_argument("--out", type=Path, help="append the result to this JSONL file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Send requests by each client, and compare its count with the router's.

    Raises:
        ClusterError: a process did not start.
        ClientError: a client saw an error, or the router counted other requests than it.
    """
    path = tiny_model.resolve(options.model)
    results: dict[str, Any] = {}
    with launching(options.logs) as launch:
        prefill = launch.worker(Role.PREFILL, path, *share_flags(0, 2))
        decode = launch.worker(Role.DECODE, path, *share_flags(1, 2))
        wait_all([prefill, decode])
        router = launch.router([prefill], [decode], "--policy", "full")
        wait_all([router])
        run_of = ClientRun(router.url, path, options.logs, options.aiperf)
        clients: dict[str, Callable[[ClientRun], int]] = {
            "openai": by_openai,
            "anthropic": by_anthropic,
            "sglang.benchmark.serving": by_sglang,
            "aiperf": by_aiperf,
        }
        for name, client in clients.items():
            print(f"  {name}", file=sys.stderr, flush=True)
            before = _counted(router.url)
            sent = client(run_of)
            after = _counted(router.url)
            seen = {kind: after[kind] - before.get(kind, 0) for kind in after}
            results[name] = {"requests": sent, **{k: v for k, v in seen.items() if v}}
            # Some warm up with requests that they do not count.
            if seen[Outcome.OK] < sent or any(seen[kind] for kind in seen if kind in _FAILURES):
                raise ClientError(f"{name} sent {sent} requests, the router saw {seen}")
    line = {"part": "clients", "model": Path(path).name, **provenance(0), "clients": results}
    if options.out is not None:
        append_whole(options.out, [line])
    print(json.dumps(line))
    return 0


_FAILURES = (
    Outcome.REJECTED,
    Outcome.OVERLOADED,
    Outcome.WORKER_ERROR,
    Outcome.TRUNCATED,
    Outcome.INTERNAL_ERROR,
)


def _counted(url: str) -> dict[str, int]:
    """Requests by outcome and turns by route, as the router counts them."""
    counts: dict[str, int] = dict.fromkeys((Outcome.OK, *_FAILURES, *Route), 0)
    for name, labels, value in read_metrics(url):
        key = {"ppd_finished_total": "outcome", "ppd_turns_total": "route"}.get(name)
        if key is not None:
            counts[labels[key]] = counts.get(labels[key], 0) + round(value)
    return counts


def by_openai(run_of: ClientRun) -> int:
    """Send chats, completions and responses by the ``openai`` client."""

    async def talk(client: openai.AsyncOpenAI, number: int) -> int:
        messages: list[Any] = []
        previous: Any = openai.omit
        for turn in range(_TURNS):
            asked = f"Conversation {number}, question {turn}: what is {number} times {turn}?"
            messages.append({"role": "user", "content": asked})
            stream = await client.chat.completions.create(
                model="default",
                messages=messages,
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
            reply, counted = "", 0
            async for chunk in stream:
                for choice in chunk.choices:
                    reply += choice.delta.content or ""
                if chunk.usage is not None:
                    counted = chunk.usage.completion_tokens
            _require(0 < counted <= 16, f"usage counts {counted} tokens")
            messages.append({"role": "assistant", "content": reply})
            response = await client.responses.create(
                model="default",
                input=asked,
                max_output_tokens=16,
                previous_response_id=previous,
            )
            _require(response.status in ("completed", "incomplete"), response.status)
            previous = response.id
        several = await client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, n=2, logprobs=True, top_logprobs=2
        )
        _require(len(several.choices) == 2, "two samples were asked for")
        _require(several.choices[1].logprobs is not None, "logprobs were asked for")
        text = await client.completions.create(model="default", prompt="Once upon", max_tokens=8)
        _require(text.usage is not None and text.usage.completion_tokens == 8, "usage")
        return 2 * _TURNS + 2 + 1

    async def all_talk() -> int:
        async with openai.AsyncOpenAI(
            base_url=f"{run_of.url}/v1", api_key="any", max_retries=0
        ) as client:
            await client.models.list()
            return sum(await asyncio.gather(*(talk(client, i) for i in range(_CONVERSATIONS))))

    return asyncio.run(all_talk())


def by_anthropic(run_of: ClientRun) -> int:
    """Send messages by the ``anthropic`` client, streamed and whole."""

    async def talk(client: anthropic.AsyncAnthropic, number: int) -> int:
        messages: list[Any] = []
        for turn in range(_TURNS):
            messages.append({"role": "user", "content": f"Say {number} and {turn} once more."})
            async with client.messages.stream(
                model="default", max_tokens=16, messages=messages
            ) as stream:
                final_message = await stream.get_final_message()
            _require(final_message.usage.output_tokens > 0, "no usage")
            text = "".join(block.text for block in final_message.content if block.type == "text")
            messages.append({"role": "assistant", "content": text})
        return _TURNS

    async def all_talk() -> int:
        async with anthropic.AsyncAnthropic(
            base_url=run_of.url, api_key="any", max_retries=0
        ) as client:
            return sum(await asyncio.gather(*(talk(client, i) for i in range(_CONVERSATIONS))))

    return asyncio.run(all_talk())


def by_sglang(run_of: ClientRun) -> int:
    """Run SGLang's benchmark: groups that share a system prompt, conversations of several turns."""
    rows = run_of.folder / "sglang-benchmark.jsonl"
    rows.unlink(missing_ok=True)
    groups, each = 2, 4
    run_to_end(
        [
            *(sys.executable, "-c", _BENCHMARK, "--backend", "sglang-oai-chat"),
            *("--base-url", run_of.url, "--model", run_of.model),
            *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(groups)),
            *("--gsp-prompts-per-group", str(each), "--gsp-num-turns", str(_TURNS)),
            *("--gsp-system-prompt-len", "128", "--gsp-question-len", "32"),
            *("--gsp-output-len", "16", "--max-concurrency", "4", "--disable-tqdm"),
            *("--output-file", str(rows), "--cache-report"),
        ],
        run_of.folder / "sglang-benchmark.log",
    )
    result = json.loads(rows.read_text().splitlines()[-1])
    completed = int(result["completed"])
    _require(completed == groups * each * _TURNS, f"it completed {completed} requests")
    return completed


def by_aiperf(run_of: ClientRun) -> int:
    """Run AIPerf: synthetic conversations with live replies."""
    command = aiperf_in(run_of.aiperf)
    artifacts = run_of.folder / "aiperf"
    log = run_of.folder / "aiperf.log"
    run_to_end(
        [
            *(str(command), "profile", "--model", "default", "--tokenizer", run_of.model),
            *("--url", run_of.url, "--endpoint-type", "chat", "--streaming"),
            *("--conversation-num", str(_CONVERSATIONS)),
            *("--conversation-turn-mean", str(_TURNS), "--conversation-turn-stddev", "0"),
            *("--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", "16"),
            *("--concurrency", "4", "--random-seed", "1", "--ui", "none"),
            # A random model may end at once, and an empty reply is an error to AIPerf.
            *("--extra-inputs", "ignore_eos:true"),
            *("--no-gpu-telemetry", "--artifact-dir", str(artifacts)),
        ],
        log,
    )
    found = sorted(artifacts.rglob("profile_export_aiperf.json"))
    _require(bool(found), f"it wrote no result; see {log}")
    result = json.loads(found[-1].read_text())
    counted = result["request_count"]
    requests = int(counted["avg"] if isinstance(counted, dict) else counted)
    errors = result.get("error_summary") or []
    _require(not errors, f"it saw errors: {errors}")
    return requests


def aiperf_in(folder: Path) -> Path:
    """Install AIPerf into an environment, unless it is there, and return its command."""
    return environment(folder, [AIPERF]) / "aiperf"


def _require(holds: bool, problem: object) -> None:
    if not holds:
        raise ClientError(str(problem))
