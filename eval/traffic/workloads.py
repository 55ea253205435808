"""From a demand to a plan: which conversations, how many, when, how large.

The same demand gives the same plan. ``kinds`` reads the formats, and ``client`` sends the requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppd.errors import ConfigError

from .conversations import Conversation, at_rate, cut, poisson_starts, scaled, starting
from .kinds import Workload, load

DEFAULT_CONVERSATIONS = 200
POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class Demand:
    """The workload that a command line asks for.

    Attributes:
        spec: the workload.
        arrivals: the spec of a trace whose arrivals are taken, or "poisson"; None: the
            workload's own, else Poisson.
        conversations: the first so many; None: all of a file, 200 of what is made here.
        qps: conversations a second; None: as the arrivals have it.
        scale: of all token counts.
        tokenizer: of the model; for text.
    """

    spec: str
    arrivals: str | None = None
    conversations: int | None = None
    qps: float | None = None
    scale: float = 1.0
    seed: int = 0
    tokenizer: Path | None = None


def plan(demand: Demand) -> list[Conversation]:
    """The conversations of a run, in order of their beginnings; the same for the same demand.

    Raises:
        ConfigError: it cannot be met; the message names the reason and what is allowed.
    """
    _check(demand)
    source = random.Random(f"{demand.spec}/{demand.seed}")
    workload = load(demand.spec, demand.tokenizer)
    kinds = _fitting(demand.spec, workload)
    wanted = demand.conversations or (DEFAULT_CONVERSATIONS if workload.endless else len(kinds))
    if wanted > len(kinds) and workload.timed and demand.arrivals is None:
        raise ConfigError(
            f"{demand.spec}: has {len(kinds)} conversations, {wanted} are wanted; more take "
            f"other arrivals: --arrivals {POISSON} --qps N"
        )
    chosen = [kinds[number % len(kinds)] for number in range(wanted)]
    if workload.think_s:
        chosen = [_thinking(conversation, workload.think_s, source) for conversation in chosen]
    if workload.prompts > 1:
        chosen = _with_prompts(chosen, workload.prompts, source)
    starts_s = _starts(demand, workload, chosen, source)
    return [scaled(conversation, demand.scale) for conversation in starting(chosen, starts_s)]


def _check(demand: Demand) -> None:
    if demand.conversations is not None and demand.conversations < 1:
        raise ConfigError(f"conversations must be at least 1, got {demand.conversations}")
    if demand.qps is not None and not 0 < demand.qps < float("inf"):
        raise ConfigError(f"qps must be above 0, got {demand.qps:g}")
    if not 0 < demand.scale <= 1:
        raise ConfigError(f"scale must be above 0 and at most 1, got {demand.scale:g}")


def _fitting(spec: str, workload: Workload) -> Sequence[Conversation]:
    if workload.max_context is None:
        return workload.kinds
    fitting = [cut(kind, workload.max_context) for kind in workload.kinds]
    if kinds := [conversation for conversation in fitting if conversation is not None]:
        return kinds
    shortest = min(
        conversation.turns[0].new_tokens + conversation.turns[0].output_tokens
        for conversation in workload.kinds
    )
    raise ConfigError(
        f"{spec}: max_context must be at least {shortest}, the shortest first turn with its reply"
    )


def _starts(
    demand: Demand, workload: Workload, chosen: Sequence[Conversation], source: random.Random
) -> list[float]:
    if demand.arrivals not in (None, POISSON):
        assert demand.arrivals is not None
        trace = load(demand.arrivals, demand.tokenizer)
        if not trace.timed:
            raise ConfigError(f"--arrivals {demand.arrivals}: has no times of arrival")
        if len(trace.kinds) < len(chosen):
            raise ConfigError(
                f"--arrivals {demand.arrivals}: has {len(trace.kinds)} arrivals, "
                f"{len(chosen)} are wanted: --conversations {len(trace.kinds)} or fewer"
            )
        starts_s = [kind.starts_at_s for kind in trace.kinds[: len(chosen)]]
    elif workload.timed and demand.arrivals is None:
        starts_s = [conversation.starts_at_s for conversation in chosen]
    elif demand.qps is None:
        raise ConfigError(f"{demand.spec}: has no arrivals: give --qps, conversations a second")
    else:
        return poisson_starts(len(chosen), demand.qps, source)
    if demand.qps is not None:
        return at_rate(starts_s, demand.qps)
    first_s = min(starts_s)
    return [at_s - first_s for at_s in starts_s]


def _thinking(conversation: Conversation, think_s: float, source: random.Random) -> Conversation:
    first, *later = conversation.turns
    drawn = (replace(turn, think_s=source.expovariate(1 / think_s)) for turn in later)
    return replace(conversation, turns=(first, *drawn))


def _with_prompts(
    conversations: Sequence[Conversation], prompts: int, source: random.Random
) -> list[Conversation]:
    """Draw the system prompt of each by Zipf's law: few assistants have most users."""
    weights = [1 / (number + 1) for number in range(prompts)]
    drawn = source.choices(range(prompts), weights, k=len(conversations))
    return [
        replace(conversation, shared_prompt=number)
        for conversation, number in zip(conversations, drawn, strict=True)
    ]
