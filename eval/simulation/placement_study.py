"""``ppd-eval simulate placement``: where new conversations go, with shared system prompts or not.

The same conversations are placed by each rule. A trace with shared prompts draws each prompt by
Zipf's law, as few assistants have most users.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from ppd.contract import Role
from ppd.errors import ConfigError
from ppd.policies import static_policy

from ..options import Commands, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from .cache import SharedPrefix
from .cost_model import Costs
from .simulator import Simulation
from .study import PACED_TOKENS
from .study_command import costs_of
from .traffic import Clients, Conversation, TurnTokens
from .workers import Chunking, PlacementRule, Shape

RULES = (PlacementRule.ROUTER_HASH, PlacementRule.ROUTER_LOAD)


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """One rule under one traffic.

    Attributes:
        shared_tokens: of each system prompt; 0: conversations share nothing.
        cached_share: tokens of first turns' prompts that were cached where they were prefilled.
        prefill_balance: time that the busiest prefill worker computed, divided by the mean.
        decode_balance: the same of decode workers.
    """

    rule: PlacementRule
    shared_tokens: int
    prompts: int
    shape: str
    qps: float
    conversations: int
    turns: int
    failed_turns: int
    cached_share: float
    t1_ttft_p50_ms: float
    t1_ttft_p99_ms: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    prefill_balance: float
    decode_balance: float
    moved_tokens_per_turn: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations of three turns that begin with a system prompt.

    Attributes:
        qps: conversations that begin in a second.
        prompts: how many system prompts there are.
        shared_tokens: of each; 0: none.
        own_tokens: of a conversation's first message, without the system prompt.
    """

    qps: float
    duration_s: float
    prompts: int
    shared_tokens: int
    own_tokens: int = 400
    later_tokens: int = 200
    reply_tokens: int = 150
    think_s: float = 8.0

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Yield the conversations of a seed."""
        source = random.Random(seed)
        weights = [1 / (i + 1) for i in range(self.prompts)]
        later = TurnTokens(self.later_tokens, self.reply_tokens)
        at_s, session = source.expovariate(self.qps), 0
        while at_s < self.duration_s:
            (number,) = source.choices(range(1, self.prompts + 1), weights)
            own = max(1, round(source.lognormvariate(0.0, 0.7) * self.own_tokens))
            shared = SharedPrefix(number, self.shared_tokens) if self.shared_tokens else None
            first = TurnTokens(self.shared_tokens + own, self.reply_tokens)
            thinks = tuple(source.expovariate(1 / self.think_s) for _ in range(2))
            yield Conversation(session, at_s, (first, later, later), thinks, shared=shared)
            at_s += source.expovariate(self.qps)
            session += 1


def add_to(commands: Commands) -> None:
    """Declare ``simulate placement``."""
    parser = commands.add_parser(
        "placement",
        help="new conversations placed by load and shared prefixes, or by a hash",
        description=(
            "Simulate the placement of new conversations, with shared system prompts and "
            "without. The last line is one JSON object."
        ),
    )
    parser.add_argument("--shape", default="4P_8pD", help="shape of the cluster")
    parser.add_argument("--qps", type=float, default=12.0, help="conversations a second, in all")
    parser.add_argument("--duration-s", type=float, default=120.0, help="duration of arrivals")
    parser.add_argument("--prompts", type=int, default=16, help="number of system prompts")
    parser.add_argument("--shared-tokens", type=int, default=8192, help="tokens of each")
    parser.add_argument(
        "--rules", nargs="+", choices=[*PlacementRule], default=[*RULES], help="rules compared"
    )
    parser.add_argument("--profile", help="of 'profile list'; default: the paper's machine")
    parser.add_argument("--link-gbps", type=float, default=100.0, help="with --profile")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each rule and traffic, and one JSON line.

    Raises:
        ConfigError: an option makes no sense.
    """
    if not (options.qps > 0 and options.duration_s > 0):
        raise ConfigError("--qps and --duration-s must be above 0")
    if options.prompts < 1 or options.shared_tokens < 1:
        raise ConfigError("--prompts and --shared-tokens must be at least 1")
    costs, about = costs_of(options)
    rows = []
    for shared_tokens in (options.shared_tokens, 0):
        trace = Trace(options.qps, options.duration_s, options.prompts, shared_tokens)
        for rule in options.rules:
            row = measure(costs, options.shape, trace, PlacementRule(rule), options.seed)
            rows.append(row)
            print(
                f"{row.rule:12} shared {row.shared_tokens:5}  cached {row.cached_share:6.1%}  "
                f"TTFT of first turns p50 {row.t1_ttft_p50_ms:7.1f} p99 {row.t1_ttft_p99_ms:8.1f} "
                f"ms  busiest P {row.prefill_balance:.2f} D {row.decode_balance:.2f} of the mean"
            )
    made = [
        {"row": "placement", **asdict(row), **about, **provenance(options.seed)} for row in rows
    ]
    if options.out is not None:
        append_whole(options.out, made)
    print(json.dumps({"rows": [asdict(row) for row in rows], **about, **provenance(options.seed)}))
    return 0


def measure(costs: Costs, shape: str, trace: Trace, rule: PlacementRule, seed: int) -> PlacementRow:
    """Simulate one rule.

    Raises:
        ConfigError: there is no such shape, or no turn succeeded.
    """
    simulation = Simulation(
        costs,
        Shape.parse(shape),
        static_policy("full"),
        Clients(),
        seed,
        delta=True,
        chunking=Chunking(paced_tokens=PACED_TOKENS),
        placement=rule,
    )
    conversations = list(trace.conversations(seed))
    result = simulation.run(conversations)
    rows = [row for row in result.rows if not row.failed]
    first = [row for row in rows if row.turn == 1]
    if not first:
        raise ConfigError(f"shape {shape}: every first turn failed")
    cached = sum(row.cached_tokens for row in first) / sum(row.prompt_tokens for row in first)
    busy: dict[Role, list[float]] = {role: [] for role in Role}
    for worker in simulation.cluster.workers.values():
        busy[worker.role].append(worker.engine.busy_ms)
    return PlacementRow(
        rule=rule,
        shared_tokens=trace.shared_tokens,
        prompts=trace.prompts,
        shape=shape,
        qps=trace.qps,
        conversations=len(conversations),
        turns=len(result.rows),
        failed_turns=len(result.rows) - len(rows),
        cached_share=round(cached, 4),
        t1_ttft_p50_ms=_quantile((row.ttft_ms for row in first), 0.5),
        t1_ttft_p99_ms=_quantile((row.ttft_ms for row in first), 0.99),
        ttft_p99_ms=_quantile((row.ttft_ms for row in rows), 0.99),
        tpot_p99_ms=_quantile((row.tpot_ms for row in rows), 0.99),
        prefill_balance=_balance(busy[Role.PREFILL]),
        decode_balance=_balance(busy[Role.DECODE] or busy[Role.REPLICA]),
        moved_tokens_per_turn=round(result.moved_tokens / len(rows), 1),
    )


def _quantile(values: Iterable[float], share: float) -> float:
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 2)


def _balance(busy_ms: list[float]) -> float:
    mean = statistics.mean(busy_ms) if busy_ms else 0.0
    return round(max(busy_ms) / mean, 3) if mean else 1.0
