"""Kinds of workload: from ``KIND[:WHAT][?KEY=VALUE&...]`` to conversations.

Generated: ``paper`` (its 18), ``turns`` (its turn scaling), ``grid`` (any). Read: ``mooncake``,
``sessions``, ``azure``, ``tau-bench``, ``mt-bench-101``, ``mini-swe``, ``sharegpt``, ``wildchat``;
docs/WORKLOADS.md has the sources of their files. ``workloads`` sets their number and arrivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ppd.errors import ConfigError

from .chats import read_sharegpt, read_wildchat
from .conversations import Conversation, PlannedTurn, hastened
from .dialogues import Count, load_count, read_agents, read_dialogues
from .traces import (
    MOONCAKE_BLOCK_TOKENS,
    Seconds,
    Tokens,
    TokensOrZero,
    read_azure,
    read_mooncake,
    read_sessions,
    with_replies,
)

S = TypeVar("S", bound="Settings")

# arXiv 2603.13358, section on workloads; github.com/freelulul/vllm-ppd,
# scripts/benchmark/comprehensive_benchmark.py (T1_CONFIGS, T2_CONFIGS). New and output tokens.
PAPER_FIRST_TURNS = {"small": (128, 128), "large": (1024, 1024)}
PAPER_LATER_TURNS = {
    "tiny": (16, 32),
    "short_gen": (32, 256),
    "long_gen": (32, 512),
    "very_long_gen": (64, 1024),
    "small_bal": (64, 64),
    "mid_bal": (128, 128),
    "mid_paste": (256, 64),
    "big_paste": (512, 64),
    "huge_paste": (1024, 32),
}
PAPER_QPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)  # conversations a second
PAPER = tuple(f"{first}_{later}" for first, later in product(PAPER_FIRST_TURNS, PAPER_LATER_TURNS))


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that every kind takes after ``?``.

    Attributes:
        max_context: conversations end before the turn that would need more.
    """

    max_context: Tokens | None = None


class Thinking(Settings, frozen=True):
    """Settings of kinds without times: the mean of an exponential think time."""

    think_s: Seconds = 0.0


class TurnScaling(Thinking, frozen=True):
    """Settings of turn scaling, as the paper's ``small_mid_bal`` with more turns."""

    first: Tokens = 128
    first_out: Tokens = 128
    new: Tokens = 128
    out: Tokens = 128


class Grid(Thinking, frozen=True):
    """Settings of a grid: lists of numbers, of which every combination is a cell.

    ``context`` is the mean of later turns. ``prompts`` is how many system prompts of ``shared``
    tokens there are.
    """

    context: str = "1024"
    new: str = "64"
    out: str = "64"
    turns: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 3
    shared: TokensOrZero = 0
    prompts: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1


class ReplaySettings(Settings, frozen=True):
    """Settings of kinds with times: all of them are divided by ``faster``."""

    faster: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0


class SessionSettings(ReplaySettings, frozen=True):
    """Settings of sessions.

    Attributes:
        replies: whether prompts hold the replies before them; 0: the file has left them out, and
            they are put back.
    """

    replies: Literal[0, 1] = 1


class Mooncake(ReplaySettings, frozen=True):
    """Settings of Mooncake's traces."""

    block: Tokens = MOONCAKE_BLOCK_TOKENS


class SharedChats(Thinking, frozen=True):
    """Settings of ShareGPT: the first ``read`` conversations with at least ``min_turns``."""

    read: Tokens | None = None
    min_turns: Tokens = 1


class WildChats(ReplaySettings, frozen=True):
    """Settings of WildChat, as of ShareGPT."""

    read: Tokens | None = None
    min_turns: Tokens = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of one kind.

    Attributes:
        kinds: conversations to hold, each of them as often as wanted if ``endless``.
        timed: their ``starts_at_s`` mean something.
        think_s: mean of think times to draw; 0: the turns' own.
        prompts: system prompts to draw from, by Zipf's law.
    """

    kinds: Sequence[Conversation]
    endless: bool = True
    timed: bool = False
    think_s: float = 0.0
    max_context: int | None = None
    prompts: int = 1


def load(spec: str, tokenizer: Path | None = None) -> Workload:
    """Read a workload by its specification.

    Args:
        tokenizer: of the model; for text.

    Raises:
        ConfigError: there is no such kind, a setting or a file is wrong.
    """
    named, _, query = spec.partition("?")
    kind, _, what = named.partition(":")
    match kind:
        case "paper":
            settings = _settings(spec, query, Thinking)
            return _made(settings, _paper(spec, what))
        case "turns":
            scaling = _settings(spec, query, TurnScaling)
            return _made(scaling, [_turns(spec, what, scaling)])
        case "grid" if not what:
            grid = _settings(spec, query, Grid)
            return replace(_made(grid, list(_grid(spec, grid))), prompts=grid.prompts)
        case "mooncake":
            mooncake = _settings(spec, query, Mooncake)
            return _read(mooncake, read_mooncake(_path(spec, what), mooncake.block))
        case "azure":
            replay_settings = _settings(spec, query, ReplaySettings)
            return _read(replay_settings, read_azure(_path(spec, what)))
        case "sessions":
            of_sessions = _settings(spec, query, SessionSettings)
            found, timed = read_sessions(_path(spec, what))
            if not of_sessions.replies:
                found = [with_replies(conversation) for conversation in found]
            return _read(of_sessions, found, timed=timed)
        case "tau-bench" | "mt-bench-101":
            settings = _settings(spec, query, Thinking)
            return _talks(settings, read_dialogues(_path(spec, what), _count(spec, tokenizer)))
        case "sharegpt":
            shared = _settings(spec, query, SharedChats)
            path, count = _path(spec, what), _count(spec, tokenizer)
            return _talks(shared, read_sharegpt(path, count, shared.read, shared.min_turns))
        case "wildchat":
            wild = _settings(spec, query, WildChats)
            path, count = _path(spec, what), _count(spec, tokenizer)
            return _read(wild, read_wildchat(path, count, wild.read, wild.min_turns))
        case "mini-swe":
            of_sessions = _settings(spec, query, SessionSettings)
            found = read_agents(_path(spec, what), _count(spec, tokenizer))
            if not of_sessions.replies:
                found = [with_replies(conversation) for conversation in found]
            return _read(of_sessions, found, timed=False)
        case _:
            raise ConfigError(
                f"workload {spec}: no such kind; allowed: paper:NAME turns:N grid mooncake:FILE "
                "azure:FILE sessions:FILE tau-bench:FILE mt-bench-101:FILE mini-swe:FILE "
                "sharegpt:FILE wildchat:FILE"
            )


def _made(settings: Thinking, kinds: Sequence[Conversation]) -> Workload:
    return Workload(kinds, think_s=settings.think_s, max_context=settings.max_context)


def _talks(settings: Thinking, found: Sequence[Conversation]) -> Workload:
    return Workload(
        found, endless=False, think_s=settings.think_s, max_context=settings.max_context
    )


def _read(
    settings: ReplaySettings, found: Sequence[Conversation], *, timed: bool = True
) -> Workload:
    kinds = [hastened(conversation, settings.faster) for conversation in found]
    return Workload(kinds, endless=False, timed=timed, max_context=settings.max_context)


def _settings(spec: str, query: str, kind: type[S]) -> S:
    pairs = parse_qsl(query, keep_blank_values=True)
    allowed = ", ".join(kind.__struct_fields__)
    try:
        if query and len(dict(pairs)) != len(query.split("&")):
            raise ValueError("settings are KEY=VALUE, each once, with & between")
        return msgspec.convert(dict(pairs), kind, strict=False)
    except ValueError as error:  # msgspec's own is one
        raise ConfigError(f"workload {spec}: {error}; allowed: {allowed}") from error


def _path(spec: str, what: str) -> Path:
    if not what:
        raise ConfigError(f"workload {spec}: must name its file, as {spec.partition(':')[0]}:FILE")
    return Path(what)


def _count(spec: str, tokenizer: Path | None) -> Count:
    if tokenizer is None:
        raise ConfigError(
            f"workload {spec}: is text, its lengths are the model's: give --tokenizer, "
            "a tokenizer.json or a folder with one"
        )
    return load_count(tokenizer)


def _paper(spec: str, what: str) -> list[Conversation]:
    if what not in (*PAPER, "all"):
        raise ConfigError(f"workload {spec}: no such workload; allowed: all {' '.join(PAPER)}")
    names = PAPER if what == "all" else (what,)
    found = []
    for name in names:
        first, _, later = name.partition("_")
        turns = PAPER_FIRST_TURNS[first], PAPER_LATER_TURNS[later]
        found.append(Conversation(0.0, tuple(PlannedTurn(*sizes) for sizes in turns), name))
    return found


def _turns(spec: str, what: str, settings: TurnScaling) -> Conversation:
    if not (what.isdecimal() and 1 <= int(what) <= 1000):
        raise ConfigError(f"workload {spec}: turns must be 1 to 1000, as turns:8; got {what!r}")
    later = [PlannedTurn(settings.new, settings.out)] * (int(what) - 1)
    return Conversation(
        0.0, (PlannedTurn(settings.first, settings.first_out), *later), f"turns-{what}"
    )


def first_turn_tokens(context: float, new: int, output: int, turns: int) -> int:
    """Return the tokens of a first turn, so that the contexts of the later ones have that mean."""
    return round(context - output - (turns - 2) / 2 * (new + output))


def _grid(spec: str, settings: Grid) -> Iterator[Conversation]:
    axes = [_numbers(spec, name, getattr(settings, name)) for name in ("context", "new", "out")]
    for context, new, output in product(*axes):
        first = first_turn_tokens(context, new, output, settings.turns)
        if first < max(1, settings.shared):
            raise ConfigError(
                f"workload {spec}: a mean context of {context} with {settings.turns} turns of "
                f"{new} new and {output} output tokens leaves the first turn {first} tokens; it "
                f"must have at least {max(1, settings.shared)}: a longer context or fewer turns"
            )
        later = [PlannedTurn(new, output)] * (settings.turns - 1)
        label = f"{context}+{new}>{output}"
        yield Conversation(0.0, (PlannedTurn(first, output), *later), label, settings.shared)


def _numbers(spec: str, name: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) < 100_000_000 for part in parts):
        raise ConfigError(
            f"workload {spec}: {name} must be numbers of tokens with commas between, got {text!r}"
        )
    return [int(part) for part in parts]
