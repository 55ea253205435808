"""``ppd-eval demo``: five questions about a pasted text, on real SGLang workers.

A conversation through prefill worker, decode worker and router; then the same one again in three
other ways. Replies are greedy, so each pass has the same text. The TTFT of a turn is measured in
three ways, each from empty caches, so that no way profits from the KV that another one has left:

- **local**: the conversation as the router serves it. Turn 1 is remote, each later turn is an
  append-prefill on the decode worker.
- **remote, delta**: the conversation from its beginning again on the same workers, through a
  router that sends every turn to the prefill worker (policy ``pd``). Each worker keeps the KV of
  this pass: the prefill worker computes the last reply and the new question, and the decode worker
  takes what it does not hold.
- **remote, full**: each turn once more, with both workers' caches emptied before it. The prefill
  worker computes the whole conversation, and all of its KV is transferred. One token of the
  reply is enough for its TTFT.

The last pass is on one monolithic server: the token ids must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ppd.contract import Role

from . import real_model
from .chat import Conversation, Message, Reply, ask, connected
from .cluster import Launcher, Process, launching, share_flags, wait_all
from .endpoints import empty_caches
from .options import Commands, cluster_options
from .provenance import provenance
from .raw_rows import append_whole
from .real_model import ServedModel

# A text and questions that a model of 135 million parameters can answer.
DOCUMENT = """\
The tide station stands on the north mole of the harbour. The keeper of the station is Maria
Lund. She has worked there for eleven years. The key to the hut hangs in the harbour office.
Visitors may enter the hut only together with the keeper.

Readings are taken four times a day, at 06:00, 12:00, 18:00 and 24:00. They are sent to the
harbour office by telephone. If the telephone line is down, the readings are written in the
green book. Missing readings must never be estimated.

The gauge was cleaned on Monday. The spare float is cracked and must not be used. The lamp on
the mole was repaired on Friday, because its cable was broken. The stove burns coal, and the
coal lasts until the end of the month.

The highest water of this month was 412 centimetres, during the storm on the ninth. The lowest
water of this month was 31 centimetres, on the third. The wind came from the north-west.

A gull with a bent wing lives on the roof of the hut. The gull is called Anton. Anton must not
be fed, because he steals the chart paper."""

QUESTIONS = (
    "What is the name of the gull?",
    "Where does the key to the hut hang?",
    "At which times are readings taken?",
    "What is done if the telephone line is down?",
    "What was the highest water of this month?",
)
TURNS = (f"{DOCUMENT}\n\n{QUESTIONS[0]}", *QUESTIONS[1:])


@dataclass(slots=True)
class Transcript:
    """The results of one pass through the conversation, a list entry for each turn."""

    routes: list[str] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)

    def add(self, context_tokens: int, reply: Reply) -> None:
        """Add a turn that followed so many tokens of context."""
        self.routes.append(reply.route)
        self.context_tokens.append(context_tokens)
        self.new_tokens.append(reply.prompt_tokens - context_tokens)
        self.cached_tokens.append(reply.cached_tokens)
        self.ttft_ms.append(round(reply.ttft_ms, 1))
        self.answers.append(reply.text)
        self.output_ids.append(reply.ids)


async def converse(
    url: str, turns: Sequence[str], max_tokens: int, on_turn: Callable[[int, Reply], None]
) -> Transcript:
    """Hold the conversation; ``on_turn`` gets the index and the reply of each turn.

    Raises:
        WorkerError: a turn failed.
    """
    seen = Transcript()
    async with connected(url) as client:
        conversation = Conversation(client, max_tokens)
        for index, text in enumerate(turns):
            context_tokens = conversation.context_tokens
            reply = await conversation.ask(text)
            seen.add(context_tokens, reply)
            on_turn(index, reply)
    return seen


@dataclass(frozen=True, slots=True)
class DemoCluster:
    """The processes of the demo.

    Attributes:
        router: with the policy ``full``.
        remote_router: of the same workers, with the policy ``pd``.
    """

    prefill: Process
    decode: Process
    monolithic: Process
    router: Process
    remote_router: Process


@dataclass(frozen=True, slots=True)
class Passes:
    """The conversation in all ways; ``full_ttft_ms`` is by turn."""

    local: Transcript
    delta: Transcript
    full_ttft_ms: list[float]
    monolithic: Transcript


async def hold_all(
    cluster: DemoCluster, max_tokens: int, on_turn: Callable[[int, Reply], None]
) -> Passes:
    """Hold the conversation in all ways; ``on_turn`` gets the turns of the first one.

    Raises:
        WorkerError: a turn failed.
    """
    workers = [cluster.prefill.url, cluster.decode.url]
    ours, remote = cluster.router.url, cluster.remote_router.url
    async with aiohttp.ClientSession() as http:
        # The workers' first transfer opens their connection, which is no part of a turn.
        await converse(ours, ["Hello."], 2, _ignore)
        await empty_caches(http, workers)
        local = await converse(ours, TURNS, max_tokens, on_turn)
        print("\nthe same conversation again, in three other ways ...", flush=True)
        await empty_caches(http, workers)
        delta = await converse(remote, TURNS, max_tokens, _ignore)
        full_ttft_ms = []
        async with connected(remote) as client:
            for messages in _histories(local.answers):
                await empty_caches(http, workers)
                reply = await ask(client, messages, 1)
                full_ttft_ms.append(round(reply.ttft_ms, 1))
    monolithic = await converse(cluster.monolithic.url, TURNS, max_tokens, _ignore)
    return Passes(local, delta, full_ttft_ms, monolithic)


def _ignore(_index: int, _reply: Reply) -> None:
    pass


def _histories(answers: Sequence[str]) -> list[list[Message]]:
    """The messages that each turn of the conversation sends."""
    messages: list[Message] = []
    histories = []
    for text, answer in zip(TURNS, answers, strict=True):
        messages.append({"role": "user", "content": text})
        histories.append(list(messages))
        messages.append({"role": "assistant", "content": answer})
    return histories


def _print_turn(index: int, reply: Reply) -> None:
    answer = " ".join(reply.text.split())
    print(f"\n{index + 1}  {QUESTIONS[index]}")
    print(textwrap.fill(answer, 96, initial_indent="   ", subsequent_indent="   "))
    print(
        f"   [{reply.route}, {reply.reason}; first token after {reply.ttft_ms:.0f} ms]", flush=True
    )


_HEADER = """\

                                                  TTFT in ms
turn  route     context     new  cached      local  remote, delta  remote, full"""
_LEGEND = """
tokens of the prompt: those of earlier turns (context), new ones, and those found in the KV cache
local:          after turn 1, the decode worker prefills the new tokens beside its own KV cache
remote, delta:  the prefill worker prefills them and transfers the KV that the decode worker lacks
remote, full:   from empty caches: the whole prompt is prefilled, and all of its KV transferred"""
_ROW = "{:>4}  {:<8} {:>8} {:>7} {:>7} {:>10.0f} {:>14.0f} {:>13.0f}"


def _print_table(passes: Passes) -> None:
    ours = passes.local
    columns = (ours.routes, ours.context_tokens, ours.new_tokens, ours.cached_tokens)
    ttfts = (ours.ttft_ms, passes.delta.ttft_ms, passes.full_ttft_ms)
    print(_HEADER)
    for number, row in enumerate(zip(*columns, *ttfts, strict=True), 1):
        print(_ROW.format(number, *row))
    print(_LEGEND)


def add_to(commands: Commands) -> None:
    """Declare ``demo``."""
    parser = commands.add_parser(
        "demo",
        parents=[cluster_options("SmolLM2-135M-Instruct")],
        help="five questions, answered in three ways",
        description=(
            "Ask five questions about a text: local, remote with delta transfer, and remote after "
            "a flush. Then ask one server and compare the token ids."
        ),
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="maximum tokens of each reply")
    parser.add_argument("--record", type=Path, help="append the result to this JSONL file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Hold the conversation in all ways, and print what each turn did.

    The last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a route or a token differs from what is expected.

    Raises:
        ClusterError: a process did not start.
        WorkerError: a turn failed.
    """
    began_s = time.monotonic()
    served = real_model.choose(options.model)
    print(f"model: {served.description}")
    print("starting a prefill worker, a decode worker, a monolithic server and routers ...")
    with launching(options.logs) as launch:
        cluster = _start(launch, served)
        print(f"ready after {time.monotonic() - began_s:.0f} s; logs in {options.logs}")
        words = len(DOCUMENT.split())
        print(f"\n{words} words of notes on a tide station are pasted into a chat; then:")
        passes = asyncio.run(hold_all(cluster, options.max_tokens, _print_turn))
        _print_table(passes)
        identical = passes.local.output_ids == passes.monolithic.output_ids
        print(f"\ntoken ids identical to the monolithic server's: {'yes' if identical else 'NO'}")
        print("stopping ...", flush=True)
    result = _result(passes) | {
        "model": Path(served.path).name,
        "took_s": round(time.monotonic() - began_s, 1),
    }
    if options.record is not None:
        append_whole(options.record, [{**result, **provenance(0)}])
    print(json.dumps(result))
    expected = ["remote"] + ["local"] * (len(TURNS) - 1)
    # A model of the caller's choice may well run in bf16, where remote and monolithic differ.
    good = identical or options.model is not None
    return 0 if passes.local.routes == expected and good else 1


def _start(launch: Launcher, served: ServedModel) -> DemoCluster:
    def worker(index: int, role: Role) -> Process:
        # The monolithic server computes only while the two others do not.
        shared = share_flags(index, 3, busy=2)
        return launch.worker(role, served.path, *served.worker_flags, *shared)

    prefill, decode = worker(0, Role.PREFILL), worker(1, Role.DECODE)
    monolithic = worker(2, Role.REPLICA)
    wait_all([prefill, decode, monolithic])
    router = launch.router([prefill], [decode], "--policy", "full")
    remote_router = launch.router([prefill], [decode], "--policy", "pd", name="pd-router")
    wait_all([router, remote_router])
    return DemoCluster(prefill, decode, monolithic, router, remote_router)


def _result(passes: Passes) -> dict[str, object]:
    local, delta, alone = passes.local, passes.delta, passes.monolithic
    return {
        "routes": local.routes,
        "cached_tokens": local.cached_tokens,
        "context_tokens": local.context_tokens,
        "new_tokens": local.new_tokens,
        "ttft_ms": local.ttft_ms,
        "delta_ttft_ms": delta.ttft_ms,
        "delta_cached_tokens": delta.cached_tokens,
        "full_ttft_ms": passes.full_ttft_ms,
        "identical_to_monolithic": local.output_ids == alone.output_ids,
        "delta_identical_to_monolithic": delta.output_ids == alone.output_ids,
        "answers": local.answers,
    }
