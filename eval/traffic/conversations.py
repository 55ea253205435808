"""Plans of conversations: sizes and times of all turns, before anything is sent.

Pure values, and the functions that change a whole plan (scale, rate, cut). Plans come from
``workloads`` and ``traces``; ``client`` holds them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ppd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One planned turn.

    It is due ``think_s`` after the end of the reply before, and not earlier than ``gap_s`` after
    the turn before was due: a trace has the times when turns arrived, not when replies ended.

    Attributes:
        keep_tokens: of the history, from its beginning; None: all of it. Traces have clients that
            cut, edit or leave out replies.
    """

    new_tokens: int
    output_tokens: int
    think_s: float = 0.0
    gap_s: float = 0.0
    keep_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """One planned conversation.

    Attributes:
        label: its kind, for comparisons within a run.
        shared_tokens: of the system prompt, with which other conversations begin, too.
        shared_prompt: number of that system prompt.
    """

    starts_at_s: float
    turns: tuple[PlannedTurn, ...]
    label: str = ""
    shared_tokens: int = 0
    shared_prompt: int = 0

    def contexts(self) -> Iterator[int]:
        """Tokens of history that each turn is sent with, if replies are as long as planned."""
        held = 0
        for turn in self.turns:
            context = held if turn.keep_tokens is None else min(held, turn.keep_tokens)
            yield context
            held = context + turn.new_tokens + turn.output_tokens

    @property
    def longest_tokens(self) -> int:
        """The most that a model must hold of it: prompt and reply of its largest turn."""
        return max(
            context + turn.new_tokens + turn.output_tokens
            for context, turn in zip(self.contexts(), self.turns, strict=True)
        )


def poisson_starts(conversations: int, qps: float, source: random.Random) -> list[float]:
    """Draw the arrivals of a Poisson process that has exactly its mean count.

    By chance alone the rates of short runs would differ by half.

    Args:
        qps: conversations a second.
    """
    all_s = conversations / qps
    return sorted(source.uniform(0.0, all_s) for _ in range(conversations))


def starting(
    conversations: Sequence[Conversation], starts_s: Sequence[float]
) -> list[Conversation]:
    """The same, each at its time, in order of time."""
    return [
        replace(conversation, starts_at_s=at_s)
        for conversation, at_s in zip(conversations, sorted(starts_s), strict=True)
    ]


def delayed(
    conversations: Sequence[Conversation], max_delay_s: float, source: random.Random
) -> list[Conversation]:
    """The same, each with a delay that is drawn evenly, in order of time."""
    moved = [
        replace(one, starts_at_s=one.starts_at_s + source.uniform(0.0, max_delay_s))
        for one in conversations
    ]
    return sorted(moved, key=lambda one: one.starts_at_s)


def at_rate(starts_s: Sequence[float], qps: float) -> list[float]:
    """A trace's arrivals, stretched to a mean rate: its bursts stay.

    Raises:
        ConfigError: they are all at one time.
    """
    if len(starts_s) < 2:
        return [0.0 for _ in starts_s]
    first_s, last_s = min(starts_s), max(starts_s)
    if last_s <= first_s:
        raise ConfigError("qps cannot stretch arrivals that are all at one time")
    factor = (len(starts_s) - 1) / qps / (last_s - first_s)
    return [(at_s - first_s) * factor for at_s in starts_s]


def hastened(conversation: Conversation, factor: float) -> Conversation:
    """All its times divided by ``factor``."""
    if factor == 1.0:
        return conversation
    planned = tuple(
        replace(turn, think_s=turn.think_s / factor, gap_s=turn.gap_s / factor)
        for turn in conversation.turns
    )
    starts_at_s = conversation.starts_at_s / factor
    return replace(conversation, starts_at_s=starts_at_s, turns=planned)


def scaled(conversation: Conversation, scale: float) -> Conversation:
    """All token counts times ``scale``, rounded up: a turn never becomes empty. Times stay."""
    if scale == 1.0:
        return conversation

    def less(tokens: int) -> int:
        return math.ceil(tokens * scale - 1e-9)  # 0.1 * 30 is a little more than 3

    planned = tuple(
        replace(
            turn,
            new_tokens=less(turn.new_tokens),
            output_tokens=less(turn.output_tokens),
            keep_tokens=None if turn.keep_tokens is None else less(turn.keep_tokens),
        )
        for turn in conversation.turns
    )
    shared = less(conversation.shared_tokens)
    return replace(conversation, turns=planned, shared_tokens=shared)


def cut(conversation: Conversation, max_context: int) -> Conversation | None:
    """Drop the turns that a model of ``max_context`` could not hold, from the first such turn on.

    Returns:
        The conversation, or None if no turn is left.
    """
    kept: list[PlannedTurn] = []
    for context, turn in zip(conversation.contexts(), conversation.turns, strict=True):
        if context + turn.new_tokens + turn.output_tokens > max_context:
            break
        kept.append(turn)
    return replace(conversation, turns=tuple(kept)) if kept else None


def within(conversations: Sequence[Conversation], seconds: float) -> list[Conversation]:
    """Drop the turns that are due after so many seconds, by arrivals and pauses alone.

    The time that replies take is not known before.

    Raises:
        ConfigError: no turn is left.
    """
    kept = []
    for conversation in conversations:
        due_s, turns = conversation.starts_at_s, []
        for number, turn in enumerate(conversation.turns):
            due_s += max(turn.think_s, turn.gap_s) if number else 0.0
            if due_s >= seconds:
                break
            turns.append(turn)
        if turns:
            kept.append(replace(conversation, turns=tuple(turns)))
    if not kept:
        raise ConfigError(f"no conversation begins within {seconds:g} s")
    return kept
