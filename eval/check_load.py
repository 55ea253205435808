"""``ppd-eval traffic check-load``: our load generator against AIPerf, on one server.

Both hold conversations of the same lengths, which begin at the same times, in turn. The client has
one core, the server the other. AIPerf sends text to ``/v1/chat/completions``, ours token ids to
``/generate``. The server reports how many tokens AIPerf's prompts have, and ours have as many. What
the engine itself measured is recorded with both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from ppd.contract import Role
from ppd.errors import ConfigError

from . import tiny_model
from .check_figures import ObservedTurn, as_text, compare, figures, of_aiperf, of_ours
from .client import hold
from .clients.generators import AIPERF, aiperf_in
from .cluster import ClientError, Process, gpu_flags, launching, run_to_end, wait_all
from .endpoints import ANY_VOCABULARY, empty_caches
from .options import Commands, add_out, cluster_options
from .prometheus import read_metrics
from .provenance import provenance
from .raw_rows import Write, appending
from .traffic.conversations import Conversation, PlannedTurn, poisson_starts

_FLAGS = ("--enable-metrics", "--max-total-tokens", "131072")
_ENGINE = ("time_to_first_token_seconds", "inter_token_latency_seconds")
_SERVER_CORE, _CLIENT_CORE = 1, 0


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A workload that both clients can hold.

    Attributes:
        first, later: characters of a turn's text.
        reply: tokens.
        qps: conversations a second.
        think_s: from a reply's end to the next turn.
    """

    conversations: int
    qps: float
    turns: int
    first: int
    later: int
    reply: int
    think_s: float

    def starts_s(self, seed: int) -> list[float]:
        """Return when its conversations begin, in seconds."""
        return poisson_starts(self.conversations, self.qps, random.Random(seed))


LOAD_SHAPES = {
    "single": LoadShape(60, qps=4.0, turns=1, first=512, later=0, reply=64, think_s=0.0),
    "multi": LoadShape(20, qps=1.2, turns=4, first=512, later=64, reply=32, think_s=0.2),
}


def trace(shape: LoadShape, seed: int, source: random.Random) -> Iterator[dict[str, Any]]:
    """Yield lines of AIPerf's ``mooncake_trace``, with text of its own for every turn."""
    for number, start_s in enumerate(shape.starts_s(seed)):
        for turn in range(shape.turns):
            letters = shape.later if turn else shape.first
            yield {
                "session_id": f"c{number}",
                "text_input": "".join(source.choices(string.ascii_letters, k=letters)),
                "output_length": shape.reply,
                **({"delay": 1e3 * shape.think_s} if turn else {"timestamp": 1e3 * start_s}),
            }


def plan(shape: LoadShape, seed: int, prompts: Sequence[int]) -> list[Conversation]:
    """The same for ours.

    Args:
        prompts: tokens of the whole prompt of each turn, as the server counted AIPerf's.
    """
    held = [0, *(prompt + shape.reply for prompt in prompts)]
    planned = tuple(
        PlannedTurn(prompt - before, shape.reply, shape.think_s if turn else 0.0)
        for turn, (prompt, before) in enumerate(zip(prompts, held, strict=False))
    )
    return [Conversation(start_s, planned) for start_s in shape.starts_s(seed)]


def add_to(commands: Commands) -> None:
    """Declare ``traffic check-load``."""
    parser = commands.add_parser(
        "check-load",
        parents=[cluster_options()],
        help="our load generator against AIPerf",
        description=(
            "Hold the same conversations on one server with this load generator and with "
            "AIPerf, in turn. Their figures are compared with each other and with the "
            "engine's. The last line is one JSON object."
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--kinds", nargs="+", choices=LOAD_SHAPES, default=[*LOAD_SHAPES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--aiperf", type=Path, default=Path(".run/aiperf"), help="its environment")
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print the differences; the last line on stdout is one JSON object.

    Raises:
        ClusterError: the server did not start.
        ClientError: AIPerf failed, or either client saw a failure.
    """
    if options.rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {options.rounds}")
    model = tiny_model.resolve(options.model)
    command = aiperf_in(options.aiperf)
    rows: list[dict[str, Any]] = []
    with (
        appending(options.out) as write,
        tempfile.TemporaryDirectory() as engine_metrics,
        launching(options.logs) as launch,
    ):
        # Else SGLang sets it when the HTTP process has imported prometheus_client already, and what
        # that process measures, TTFT among it, is not in /metrics.
        launch.environment["PROMETHEUS_MULTIPROC_DIR"] = engine_metrics
        gpu = gpu_flags(0, 1)
        core = None if gpu else _SERVER_CORE
        server = launch.worker(Role.REPLICA, model, *_FLAGS, *gpu, core=core)
        wait_all([server])
        with _on_core(None if gpu else _CLIENT_CORE):
            for kind in options.kinds:
                check = _Check(server, model, command, options.logs, kind, write)
                rows += check.rounds(options.rounds)
    differences = compare(rows)
    print(as_text(differences))
    print(json.dumps({"part": "check-load", "differences": differences}))
    return 0


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """This process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class _Check:
    server: Process
    model: str
    aiperf: Path
    logs: Path
    kind: str
    write: Write

    def rounds(self, rounds: int) -> list[dict[str, Any]]:
        """A ``run`` row for each client and round."""
        shape = LOAD_SHAPES[self.kind]
        # Kernels warm up, and the server counts the tokens of AIPerf's prompts.
        prompts = prompt_tokens(self._by_aiperf(shape, -1), shape)
        self._by_ours(shape, -1, prompts)
        rows = []
        for number in range(rounds):
            clients = ("ours", "aiperf") if number % 2 == 0 else ("aiperf", "ours")
            for client in clients:
                before = engine_sums(self.server.url)
                if client == "ours":
                    seen = self._by_ours(shape, number, prompts)
                else:
                    seen = self._by_aiperf(shape, number)
                    if (now := prompt_tokens(seen, shape)) != prompts:
                        raise ClientError(f"AIPerf's prompts had {prompts} tokens, now {now}")
                engine = engine_means(before, engine_sums(self.server.url))
                rows.append(self._run_row(client, number, shape, seen, engine))
            print(f"  {self.kind}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        return rows

    def _run_row(
        self,
        client: str,
        number: int,
        shape: LoadShape,
        seen: Sequence[ObservedTurn],
        engine: dict[str, float],
    ) -> dict[str, Any]:
        asked = {"part": "check-load", "kind": self.kind, "client": client, "round": number}
        for turn in seen:
            self.write({"row": "turn", **asked, **asdict(turn)})
        row = {"row": "run", **asked, "talk": asdict(shape), "aiperf": AIPERF, **figures(seen)}
        row |= {"engine": engine, "model": Path(self.model).name, **provenance(number)}
        self.write(row)
        return row

    def _by_ours(self, shape: LoadShape, number: int, prompts: Sequence[int]) -> list[ObservedTurn]:
        async def held() -> list[ObservedTurn]:
            async with aiohttp.ClientSession() as http:
                await empty_caches(http, [self.server.url])
            conversations = plan(shape, number, prompts)
            content = f"{self.kind}/{number}"
            url = self.server.url
            return of_ours(await hold(url, conversations, seed=content, vocabulary=ANY_VOCABULARY))

        return _complete("ours", uvloop.run(held()), shape)

    def _by_aiperf(self, shape: LoadShape, number: int) -> list[ObservedTurn]:
        folder = self.logs / f"check-load-{self.kind}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        source = random.Random(f"{self.kind}/{number}")
        lines = [json.dumps(row) for row in trace(shape, number, source)]
        (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
        records = folder / "profile_export.jsonl"
        records.unlink(missing_ok=True)

        async def emptied() -> None:
            async with aiohttp.ClientSession() as http:
                await empty_caches(http, [self.server.url])

        uvloop.run(emptied())
        run_to_end(
            [
                *(str(self.aiperf), "profile", "--model", "default", "--tokenizer", self.model),
                *("--url", self.server.url, "--endpoint-type", "chat", "--streaming"),
                *("--input-file", str(folder / "trace.jsonl"), "--fixed-schedule"),
                *("--custom-dataset-type", "mooncake-trace", "--use-server-token-count"),
                *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
                *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder)),
                "--no-server-metrics",  # it would ask the server three times a second
            ],
            folder / "aiperf.log",
        )
        return _complete("AIPerf", of_aiperf(records), shape)


def _complete(client: str, seen: list[ObservedTurn], shape: LoadShape) -> list[ObservedTurn]:
    expected = shape.conversations * shape.turns
    if len(seen) != expected:
        raise ClientError(f"{client}: {len(seen)} of {expected} turns succeeded")
    if wrong := {turn.output_tokens for turn in seen} - {shape.reply}:
        raise ClientError(f"{client}: replies of {sorted(wrong)} tokens, asked for {shape.reply}")
    return seen


def prompt_tokens(seen: Sequence[ObservedTurn], shape: LoadShape) -> list[int]:
    """Return the prompt tokens of each turn, which are alike in all conversations.

    Raises:
        ClientError: they differ from conversation to conversation.
    """
    found = [
        {turn.prompt_tokens for turn in seen if turn.turn == n + 1} for n in range(shape.turns)
    ]
    if any(len(lengths) != 1 for lengths in found):
        lengths_by_turn = [sorted(lengths) for lengths in found]
        raise ClientError(f"prompts of the same text have different lengths: {lengths_by_turn}")
    return [lengths.pop() for lengths in found]


def engine_sums(url: str) -> dict[str, tuple[float, float]]:
    """Return sum in seconds and count of what the engine has measured since it started."""
    totals: dict[str, float] = {}
    for name, _, value in read_metrics(url):
        totals[name] = totals.get(name, 0.0) + value
    return {
        name: (totals.get(f"sglang:{name}_sum", 0.0), totals.get(f"sglang:{name}_count", 0.0))
        for name in _ENGINE
    }


def engine_means(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """Return the means in ms of what was measured between two readings, without what was not."""
    means = {}
    for name, (total_s, count) in after.items():
        total_before_s, count_before = before[name]
        if count > count_before:
            mean_ms = 1e3 * (total_s - total_before_s) / (count - count_before)
            means[name.removesuffix("_seconds") + "_ms"] = round(mean_ms, 3)
    return means
