"""What simulated clients send: conversations, when they begin, how many at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from ppd.errors import ConfigError

from ..traffic.kinds import PAPER_FIRST_TURNS, PAPER_LATER_TURNS, PAPER_QPS
from .cache import SharedPrefix


class TurnTokens(msgspec.Struct, frozen=True):
    """One turn: tokens that it adds, and those of its reply. Tokens are exact.

    Attributes:
        drops_reply: the reply before it is not sent back, as by clients that leave out reasoning.
    """

    new: int
    out: int
    drops_reply: bool = False


class Workload(msgspec.Struct, frozen=True):
    """Conversations that are all alike, at several rates.

    Attributes:
        qps: conversations that begin in a second.
        think_s: between a reply and the next turn.
    """

    name: str
    turns: tuple[TurnTokens, ...]
    qps: tuple[float, ...]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Clients:
    """How a load generator behaves.

    Attributes:
        connections: so many turns are under way at most, the others wait for one and their clocks
            run. A conversation that goes on without a pause keeps its own. None: no bound.
        replies_lost: replies are sent back as text that makes other tokens than were generated,
            so that no cache holds them.
        timeout_s: of a turn, from when its clock starts; then its conversation has failed.
    """

    connections: int | None = None
    timeout_s: float = float("inf")
    replies_lost: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation to simulate.

    Attributes:
        think_s: before each turn but the first, from the end of the reply before it.
        since_arrival: ... from when that turn arrived, as traces have it; never before its end.
        shared: the prefix of its first turn that other conversations have, too.
    """

    session: int
    at_s: float
    turns: tuple[TurnTokens, ...]
    think_s: tuple[float, ...]
    since_arrival: bool = False
    shared: SharedPrefix | None = None


def paper() -> tuple[Workload, ...]:
    """The 18 of arXiv 2603.13358: two turns each, without a pause, at ten rates."""
    return tuple(
        Workload(f"{first}_{later}", (TurnTokens(*sizes), TurnTokens(*more)), PAPER_QPS)
        for first, sizes in PAPER_FIRST_TURNS.items()
        for later, more in PAPER_LATER_TURNS.items()
    )


def load(path: Path) -> tuple[Workload, ...]:
    """Read the workloads of a JSON file; ``paper`` names the paper's.

    Raises:
        ConfigError: the file is missing, or holds no workloads.
    """
    if path == Path("paper"):
        return paper()
    try:
        workloads = msgspec.json.decode(path.read_bytes(), type=tuple[Workload, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for workload in workloads:
        if (
            not workload.turns
            or min(min(t.new, t.out) for t in workload.turns) < 1
            or min(workload.qps) <= 0
        ):
            raise ConfigError(
                f"{path}: {workload.name} must have turns of at least one token, qps above 0"
            )
    return workloads


def lengthened(workload: Workload, by: float) -> Workload:
    """The same with inputs ``by`` times as long; replies stay."""
    turns = tuple(TurnTokens(max(1, round(turn.new * by)), turn.out) for turn in workload.turns)
    return msgspec.structs.replace(workload, turns=turns)


def poisson(
    workload: Workload, qps: float, duration_s: float, source: random.Random
) -> Iterator[Conversation]:
    """Draw as many arrivals as should come in ``duration_s``, less those that would come later."""
    at_s = 0.0
    for session in range(int(qps * duration_s)):
        at_s += source.expovariate(qps)
        if at_s < duration_s:
            pauses = len(workload.turns) - 1
            think = workload.think_s
            thinks = tuple(source.expovariate(1 / think) if think else 0.0 for _ in range(pauses))
            yield Conversation(session, at_s, workload.turns, thinks)


def mixed(
    workloads: tuple[Workload, ...],
    qps: float,
    duration_s: float,
    think_s: float | None,
    source: random.Random,
) -> Iterator[Conversation]:
    """Draw ``qps`` conversations a second for ``duration_s``, each like one of ``workloads``.

    Args:
        think_s: mean pause, exponential; None: the workload's own.
    """
    at_s = source.expovariate(qps)
    session = 0
    while at_s < duration_s:
        workload = source.choice(workloads)
        think = workload.think_s if think_s is None else think_s
        pauses = len(workload.turns) - 1
        thinks = tuple(source.expovariate(1 / think) if think else 0.0 for _ in range(pauses))
        yield Conversation(session, at_s, workload.turns, thinks)
        session += 1
        at_s += source.expovariate(qps)


class _TraceTurn(msgspec.Struct):
    """A row of a trace: turn ``k`` of session ``s`` at ``t`` seconds, with ``new`` tokens after the
    ``ctx`` of earlier ones."""

    s: int
    k: int
    t: float
    ctx: int
    new: int
    out: int


def traced(path: Path, copies: int) -> list[Conversation]:
    """A trace's conversations, each ``copies`` times, spread over the second that follows.

    What the trace's contexts hold beyond the turns in it (of earlier ones that it does not show)
    counts as new. A turn that forks, or cuts its history, begins a conversation of its own.

    Raises:
        ConfigError: the file is missing, or a line is no turn; the message names it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    decode = msgspec.json.Decoder(_TraceTurn).decode
    sessions: dict[int, list[_TraceTurn]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        sessions.setdefault(row.s, []).append(row)
    conversations: list[Conversation] = []
    for rows in sessions.values():
        for turns in _branches(sorted(rows, key=lambda row: row.k)):
            gaps = tuple(max(0.0, b.t - a.t) for a, b in pairwise(row for row, _ in turns))
            exchanges = tuple(exchange for _, exchange in turns)
            for copy in range(copies):
                at_s = turns[0][0].t + copy / copies
                session = len(conversations)
                conversations.append(
                    Conversation(session, at_s, exchanges, gaps, since_arrival=True)
                )
    return conversations


def _branches(rows: Iterable[_TraceTurn]) -> list[list[tuple[_TraceTurn, TurnTokens]]]:
    """Divide a session's rows, in order of their turns, into conversations that only append."""
    branches: list[list[tuple[_TraceTurn, TurnTokens]]] = []
    prompt = held = 0  # tokens at the end of the branch that goes on: without its reply, and with
    number = 0
    for row in rows:
        output = max(1, row.out)
        drops_reply = row.ctx == prompt < held
        if branches and row.k > number and (row.ctx >= held or drops_reply):
            new = row.new if drops_reply else row.ctx - held + row.new
            branches[-1].append((row, TurnTokens(max(1, new), output, drops_reply)))
        elif branches and row.k == number:  # a fork, which no later turn continues
            branches.insert(0, [(row, TurnTokens(max(1, row.ctx + row.new), output))])
            continue
        else:
            branches.append([(row, TurnTokens(max(1, row.ctx + row.new), output))])
        number, prompt = row.k, row.ctx + row.new
        held = prompt + row.out
    return branches
