"""``ppd-eval bench placement``: where the router places new conversations, on fake workers.

The same conversations, once with shared system prompts and once without, go through the router
with each rule. The workers have a prefix cache and a queue (``fake_worker/prefixes.py``), so a
prompt takes the time of what its worker does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppd.contract import Role
from ppd.errors import ConfigError

from .chat import Conversation, connected
from .cluster import launching, wait_all
from .fake_worker.prefixes import PrefixScript, Rooms, prefix_worker
from .fake_worker.worker import FakeWorker
from .options import Commands, add_out
from .provenance import provenance
from .raw_rows import append_whole

_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_BYTES_PER_TOKEN = 4
_REPLY_TOKENS = 8
_READY_S = 60.0
_RULES = ("hash", "load")  # of the router's option ``placement``


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """One turn, as its client measured it.

    Attributes:
        cached_tokens: of the prompt, where it was prefilled.
    """

    rule: str
    shared_tokens: int
    session: int
    turn: int
    route: str
    reason: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """The conversations of a run.

    Attributes:
        qps: conversations that begin in a second.
        prompts: how many system prompts there are; their use follows Zipf's law.
        shared_tokens: of each system prompt; 0: each conversation has one of its own, short.
    """

    qps: float
    conversations: int
    prompts: int
    shared_tokens: int
    own_tokens: int = 400

    def openings(self, seed: int) -> Iterator[tuple[float, str, str]]:
        """Yield when each conversation begins, its system prompt and its first message."""
        source = random.Random(seed)
        weights = [1 / (i + 1) for i in range(self.prompts)]
        systems = [_text(source, self.shared_tokens) for _ in weights]
        at_s = 0.0
        for _ in range(self.conversations):
            (system,) = source.choices(systems, weights)
            own = max(8, round(source.lognormvariate(0.0, 0.7) * self.own_tokens))
            yield at_s, system, _text(source, own)
            at_s += source.expovariate(self.qps)


def add_to(commands: Commands) -> None:
    """Declare ``bench placement``."""
    parser = commands.add_parser(
        "placement",
        help="placement of new conversations by load and shared prefixes, or by a hash",
        description=(
            "Measure the placement of new conversations on fake workers, with shared system "
            "prompts and without. The last line is one JSON object."
        ),
    )
    parser.add_argument("--prefill", type=int, default=4, help="number of prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="number of decode workers")
    parser.add_argument("--qps", type=float, default=20.0, help="conversations a second")
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=16, help="number of system prompts")
    parser.add_argument("--shared-tokens", type=int, default=8192, help="tokens of each")
    parser.add_argument("--us-per-token", type=float, default=40.0, help="time to prefill a token")
    parser.add_argument("--capacity-tokens", type=int, default=200_000, help="of each KV cache")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each rule and traffic, and one JSON line.

    Raises:
        ConfigError: an option makes no sense.
    """
    counts = (options.prefill, options.decode, options.conversations, options.prompts)
    if min(counts) < 1 or options.shared_tokens < 1 or options.capacity_tokens < 1:
        raise ConfigError("numbers of workers, conversations, prompts and tokens must be above 0")
    if not (options.qps > 0 and options.us_per_token > 0):
        raise ConfigError("--qps and --us-per-token must be above 0")
    summaries = []
    for shared_tokens in (options.shared_tokens, 0):
        load = Load(options.qps, options.conversations, options.prompts, shared_tokens)
        for rule in _RULES:
            turns, summary = asyncio.run(_measure(rule, load, options))
            summaries.append(summary)
            print(
                f"{rule:5} shared {shared_tokens:5}  cached {summary['cached_share']:6.1%}  "
                f"TTFT of first turns p50 {summary['t1_ttft_p50_ms']:7.1f} "
                f"p99 {summary['t1_ttft_p99_ms']:7.1f} ms  "
                f"busiest P {summary['prefill_balance']:.2f} D {summary['decode_balance']:.2f} "
                "of the mean"
            )
            if options.out is not None:
                origin = {"row": "placed", **provenance(options.seed)}
                rows = [{**origin, **asdict(turn)} for turn in turns]
                append_whole(options.out, [*rows, {**origin, "row": "placement", **summary}])
    print(json.dumps({"rows": summaries, **provenance(options.seed)}))
    return 0


async def _measure(
    rule: str, load: Load, options: argparse.Namespace
) -> tuple[list[PlacedTurn], dict[str, Any]]:
    async with _cluster(rule, options) as (url, workers):
        turns = await _drive(url, rule, load, options.seed)
        computed = {role: _of(workers, role) for role in (Role.PREFILL, Role.DECODE)}
    first = [turn for turn in turns if turn.turn == 1]
    ttfts = sorted(turn.ttft_ms for turn in first)
    cached = sum(turn.cached_tokens for turn in first) / sum(turn.prompt_tokens for turn in first)
    return turns, {
        "rule": rule,
        "shared_tokens": load.shared_tokens,
        "prompts": load.prompts,
        "prefill": options.prefill,
        "decode": options.decode,
        "qps": load.qps,
        "conversations": load.conversations,
        "us_per_token": options.us_per_token,
        "cached_share": round(cached, 4),
        "t1_ttft_p50_ms": round(statistics.median(ttfts), 2),
        "t1_ttft_p99_ms": round(ttfts[min(len(ttfts) - 1, int(0.99 * len(ttfts)))], 2),
        "prefill_balance": _balance([one.computed_tokens for one in computed[Role.PREFILL]]),
        "decode_balance": _balance([one.requests for one in computed[Role.DECODE]]),
    }


@asynccontextmanager
async def _cluster(
    rule: str, options: argparse.Namespace
) -> AsyncIterator[tuple[str, list[FakeWorker]]]:
    rooms = Rooms()
    settings = {
        "ms_per_token": options.us_per_token / 1e3,
        "step_ms": 5.0,
        "capacity_tokens": options.capacity_tokens,
    }
    async with AsyncExitStack() as stack:
        counts = {Role.PREFILL: options.prefill, Role.DECODE: options.decode}
        workers = [
            await stack.enter_async_context(prefix_worker(role, rooms, **settings).serving())
            for role, count in counts.items()
            for _ in range(count)
        ]
        logs = Path(stack.enter_context(TemporaryDirectory()))
        launcher = stack.enter_context(launching(logs))
        config = logs / "router.toml"
        config.write_text(f'placement = "{rule}"\npolicy = "full"\n')
        urls = {
            role: [one.url for one in workers if one.role == role.value]
            for role in (Role.PREFILL, Role.DECODE)
        }
        router = launcher.router(urls[Role.PREFILL], urls[Role.DECODE], "--config", str(config))
        await asyncio.to_thread(wait_all, [router], _READY_S)
        yield router.url, workers


async def _drive(url: str, rule: str, load: Load, seed: int) -> list[PlacedTurn]:
    loop = asyncio.get_running_loop()
    turns: list[PlacedTurn] = []

    async def converse(session: int, at_s: float, system: str, text: str, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
        chat = Conversation(client, _REPLY_TOKENS)
        if system:
            chat.messages.append({"role": "system", "content": system})
        for number, message in enumerate((text, "and then?"), 1):
            reply = await chat.ask(message)
            turns.append(
                PlacedTurn(
                    rule,
                    load.shared_tokens,
                    session,
                    number,
                    reply.route,
                    reply.reason,
                    reply.ttft_ms,
                    reply.prompt_tokens,
                    reply.cached_tokens,
                )
            )

    openings = list(load.openings(seed))
    async with connected(url) as client:
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for session, opening in enumerate(openings):
                tasks.create_task(converse(session, *opening, began_s))
    return turns


def _text(source: random.Random, tokens: int) -> str:
    return "".join(source.choices(_LETTERS, k=tokens * _BYTES_PER_TOKEN))


def _of(workers: Sequence[FakeWorker], role: Role) -> list[PrefixScript]:
    scripts = [worker.script for worker in workers if worker.role == role]
    return [script for script in scripts if isinstance(script, PrefixScript)]


def _balance(counts: Sequence[int]) -> float:
    mean = statistics.mean(counts)
    return round(max(counts) / mean, 3) if mean else 1.0
