"""What simulated clients send: conversations, when they begin, how many at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.errors import ConfigError


class Exchange(msgspec.Struct, frozen=True):
    """One turn: tokens that it adds, and those of its reply. Tokens are exact."""

    new: int
    out: int


class Workload(msgspec.Struct, frozen=True):
    """Conversations that are all alike, at several rates.

    Attributes:
        qps: conversations that begin in a second.
        think_s: between a reply and the next turn.
    """

    name: str
    turns: tuple[Exchange, ...]
    qps: tuple[float, ...]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Clients:
    """How a load generator behaves.

    Attributes:
        connections: so many turns are under way at most, the others wait for one and their clocks
            run. A conversation that goes on without a pause keeps its own. None: no bound.
        replies_lost: replies are sent back as text that makes other tokens than were generated,
            so that no cache knows them.
        timeout_s: of a turn, from when its clock starts; then its conversation has failed.
    """

    connections: int | None = None
    timeout_s: float = float("inf")
    replies_lost: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    session: int
    at_s: float
    turns: tuple[Exchange, ...]
    think_s: tuple[float, ...]  # before each turn but the first


def load(path: Path) -> tuple[Workload, ...]:
    """Raises:
    ConfigError: the file is missing, or holds no workloads.
    """
    try:
        workloads = msgspec.json.decode(path.read_bytes(), type=tuple[Workload, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for one in workloads:
        if not one.turns or min(min(t.new, t.out) for t in one.turns) < 1 or min(one.qps) <= 0:
            raise ConfigError(
                f"{path}: {one.name} must have turns of at least one token, qps above 0"
            )
    return workloads


def lengthened(workload: Workload, by: float) -> Workload:
    """The same with inputs ``by`` times as long; replies stay."""
    turns = tuple(Exchange(max(1, round(turn.new * by)), turn.out) for turn in workload.turns)
    return msgspec.structs.replace(workload, turns=turns)


def poisson(
    workload: Workload, qps: float, duration_s: float, source: random.Random
) -> Iterator[Conversation]:
    """As many as should come in ``duration_s``, less those that by chance would come later."""
    at_s = 0.0
    for session in range(int(qps * duration_s)):
        at_s += source.expovariate(qps)
        if at_s < duration_s:
            pauses = len(workload.turns) - 1
            think = workload.think_s
            thinks = tuple(source.expovariate(1 / think) if think else 0.0 for _ in range(pauses))
            yield Conversation(session, at_s, workload.turns, thinks)
